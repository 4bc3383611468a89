"""Local training of many clients in one batch, DP-SGD and evaluation.

Networks and optimizers are in `models`, and what leaves a client after it trained in `runtime`.
"""
