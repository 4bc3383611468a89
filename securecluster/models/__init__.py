"""Neural networks: objectives, architectures, any nn.Module as a flat vector, batched layers and
optimizers.

Local training on clients' data is in `training`.
"""
