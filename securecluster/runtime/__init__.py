"""Runtime of a run: the server's verbs, client endpoints, transports, aggregators, checkpoints."""
