"""What the author of a protocol imports, in one place.

    from securecluster.protocols.authoring import ClusteringProtocol, SumClient, protocol

A protocol is a class with `@protocol`, its hyper-parameters as fields, `client` (what clients
answer), `run_server` (the server's loop) and `assign_newcomers`. CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

from securecluster.messaging.messages import Ack, Empty, Picks, Rows, Shared
from securecluster.messaging.replies import Pairs, Replies, Sums
from securecluster.protocols.common.averaging import (
    AveragingState,
    LocalFirstClient,
    SumClient,
    average_clusters,
)
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient, UpdateClient
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.dp_options import ReleaseCounts
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sampling import TRIES, sample_clients
from securecluster.runtime.endpoint import GATHER, PAIRS, SUM, CallContext, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel

__all__ = [
    "GATHER",
    "PAIRS",
    "SUM",
    "TRIES",
    "Ack",
    "AverageDeltas",
    "AveragingState",
    "CallContext",
    "ClusteringProtocol",
    "Empty",
    "LocalFirstClient",
    "Pairs",
    "PendingUpdates",
    "Picks",
    "ReleaseCounts",
    "Replies",
    "Rows",
    "Run",
    "ServerChannel",
    "Shared",
    "SumClient",
    "Sums",
    "TrainingClient",
    "Update",
    "UpdateClient",
    "answers",
    "average_clusters",
    "check_newcomers",
    "flush",
    "protocol",
    "sample_clients",
]
