"""What the author of a protocol imports, in one place.

    from securecluster.protocols import authoring as fl

    @fl.protocol
    class MyMethod(fl.ClusteringProtocol): ...

A protocol is a class with `@protocol`, its hyper-parameters as fields, `client` (what clients
answer), `run_server` (the server's loop) and `assign_newcomers`; `ClusterOnce` has the loop of
methods that cluster before any training, `AssignEachRound` that of methods that assign each client
one of k models in every round, and `ModelSetProtocol` what methods share that average k models.
docs/add-a-protocol.md has the steps.

`authoring.pyi` lists the names with the modules that they are from. Each is loaded when it is asked
for, so that a small protocol loads what it uses.
"""

from securecluster.core.lazy_names import attach

__getattr__, _HOMES = attach(__name__, __file__)
__all__ = sorted(_HOMES)
