"""What the author of a protocol imports, in one place.

    from securecluster.protocols.authoring import ClusteringProtocol, SumClient, protocol

A protocol is a class with `@protocol`, its hyper-parameters as fields, `client` (what clients
answer), `run_server` (the server's loop) and `assign_newcomers`; `ClusterOnce` has the loop of
methods that cluster before any training, `AssignEachRound` that of methods that assign each client
one of k models in every round, and `ModelSetProtocol` what methods share that average k models.
docs/add-a-protocol.md has the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from securecluster.clustering.agglomerative import linkage_clusters, nearest
from securecluster.clustering.k_means import kmeans
from securecluster.clustering.labels import check_number as check_clusters
from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import group
from securecluster.core.validation import (
    AtLeast,
    Number,
    OneOf,
    check_choice,
    check_number,
    check_whole,
)
from securecluster.errors import UsageError
from securecluster.messaging.bounds import Real, Whole
from securecluster.messaging.messages import Ack, Empty, Picks, Rows, Shared
from securecluster.messaging.replies import Pairs, Replies, Sums
from securecluster.protocols.common.averages.assign_each_round import (
    AssignEachRound,
    AssignEachRoundState,
)
from securecluster.protocols.common.averages.averaging import (
    AveragingState,
    LocalFirstClient,
    SumClient,
    average_clusters,
)
from securecluster.protocols.common.averages.cluster_once import ClusterOnce, ClusterOnceState
from securecluster.protocols.common.averages.model_set_protocol import (
    ModelSetProtocol,
    ModelSetState,
    deliver_models,
    send_models,
)
from securecluster.protocols.common.averages.model_sets import (
    AssignedModel,
    AssignedModelClient,
    ModelAverages,
    ModelSetClient,
)
from securecluster.protocols.common.averages.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.averages.restarts import OfferedModels, Restart
from securecluster.protocols.common.averages.sampling import TRIES, sample_clients
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient, UpdateClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.comparison.eigenvectors import (
    EigenvectorClient,
    EigenvectorProtocol,
    Eigenvectors,
)
from securecluster.protocols.common.comparison.gradient_signatures import SignatureClient
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.protocols.common.messages import AverageDeltas, ModelChoice, Update
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.observer import Observer
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, PAIRS, SUM, answers
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel

__all__ = [
    "GATHER",
    "PAIRS",
    "SUM",
    "TRIES",
    "Ack",
    "AssignEachRound",
    "AssignEachRoundState",
    "AssignedModel",
    "AssignedModelClient",
    "AtLeast",
    "AverageDeltas",
    "AveragingState",
    "CallContext",
    "ClientTensor",
    "ClusterOnce",
    "ClusterOnceState",
    "ClusteringProtocol",
    "Disclosures",
    "EigenvectorClient",
    "EigenvectorProtocol",
    "Eigenvectors",
    "Empty",
    "LocalFirstClient",
    "ModelAverages",
    "ModelChoice",
    "ModelSetClient",
    "ModelSetProtocol",
    "ModelSetState",
    "Number",
    "Observer",
    "OfferedModels",
    "OneOf",
    "Pairs",
    "PendingUpdates",
    "Picks",
    "PrivacyOptions",
    "Real",
    "Replies",
    "Restart",
    "Rows",
    "Run",
    "ServerChannel",
    "Shared",
    "SignatureClient",
    "SumClient",
    "Sums",
    "TrainingClient",
    "Update",
    "UpdateClient",
    "UsageError",
    "Whole",
    "answers",
    "average_clusters",
    "check_choice",
    "check_clusters",
    "check_newcomers",
    "check_number",
    "check_whole",
    "deliver_models",
    "flush",
    "group",
    "kmeans",
    "linkage_clusters",
    "nearest",
    "protocol",
    "sample_clients",
    "send_models",
    "torch",
]
