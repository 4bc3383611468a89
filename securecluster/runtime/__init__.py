"""Runtime of a run: the server's verbs, client endpoints, transports, aggregators, checkpoints.

What is sent through a verb is a matter of protocols, and what hides it of `protections`.
"""
