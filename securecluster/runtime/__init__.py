"""The runtime: the server's verbs, client endpoints, transports, aggregators, runs with
checkpoints.
"""
