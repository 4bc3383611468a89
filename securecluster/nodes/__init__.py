"""Runs on many machines: nodes of clients and of the key authority, their owners' policies, how all
agree on a run, and what carries their messages.

A server's verbs and a client's endpoint know nothing of machines, and are in `runtime`.
"""
