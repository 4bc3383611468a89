"""The names of `authoring` with their types; `authoring` itself reads from here where each is."""

from securecluster.clustering.agglomerative import linkage_clusters as linkage_clusters
from securecluster.clustering.agglomerative import nearest as nearest
from securecluster.clustering.k_means import kmeans as kmeans
from securecluster.clustering.k_means import kmeans_of_points as kmeans_of_points
from securecluster.clustering.labels import check_clusters as check_clusters
from securecluster.clustering.labels import largest as largest
from securecluster.clustering.labels import members as members
from securecluster.clustering.labels import relabel as relabel
from securecluster.clustering.pairs import check_pairs as check_pairs
from securecluster.clustering.similarity import gram as gram
from securecluster.core.lazy_torch import torch as torch
from securecluster.core.option_groups import group as group
from securecluster.core.randomness import Randomness as Randomness
from securecluster.core.validation import IN_PYTHON as IN_PYTHON
from securecluster.core.validation import AtLeast as AtLeast
from securecluster.core.validation import Between as Between
from securecluster.core.validation import Number as Number
from securecluster.core.validation import OneOf as OneOf
from securecluster.core.validation import check_choice as check_choice
from securecluster.core.validation import check_number as check_number
from securecluster.core.validation import check_whole as check_whole
from securecluster.data.facts import Facts as Facts
from securecluster.data.federation import Federation as Federation
from securecluster.errors import FrameError as FrameError
from securecluster.errors import PolicyError as PolicyError
from securecluster.errors import UpdateError as UpdateError
from securecluster.errors import UsageError as UsageError
from securecluster.errors import unknown as unknown
from securecluster.messaging.bounds import Real as Real
from securecluster.messaging.bounds import Upto as Upto
from securecluster.messaging.bounds import Whole as Whole
from securecluster.messaging.messages import Ack as Ack
from securecluster.messaging.messages import Empty as Empty
from securecluster.messaging.messages import Picks as Picks
from securecluster.messaging.messages import Rows as Rows
from securecluster.messaging.messages import Shared as Shared
from securecluster.messaging.replies import Pairs as Pairs
from securecluster.messaging.replies import Replies as Replies
from securecluster.messaging.replies import Sums as Sums
from securecluster.models.flat_model import FlatModel as FlatModel
from securecluster.models.objectives import Classification as Classification
from securecluster.parties.derived import check_start_models as check_start_models
from securecluster.parties.derived import initial_model as initial_model
from securecluster.parties.derived import resolved_defaults as resolved_defaults
from securecluster.privacy.dp.loss_mechanism import LARGEST_SENT_LOSS as LARGEST_SENT_LOSS
from securecluster.privacy.dp.loss_mechanism import WORST_LOSS as WORST_LOSS
from securecluster.privacy.pipeline import Pipeline as Pipeline
from securecluster.protocols.common.averages.assign_each_round import (
    AssignEachRound as AssignEachRound,
)
from securecluster.protocols.common.averages.assign_each_round import (
    AssignEachRoundState as AssignEachRoundState,
)
from securecluster.protocols.common.averages.averaging import AveragingState as AveragingState
from securecluster.protocols.common.averages.averaging import LocalFirstClient as LocalFirstClient
from securecluster.protocols.common.averages.averaging import SharedModelClient as SharedModelClient
from securecluster.protocols.common.averages.averaging import SumClient as SumClient
from securecluster.protocols.common.averages.averaging import average_clusters as average_clusters
from securecluster.protocols.common.averages.averaging import (
    visible_sample_counts as visible_sample_counts,
)
from securecluster.protocols.common.averages.averaging import weighted_means as weighted_means
from securecluster.protocols.common.averages.cluster_once import ClusterOnce as ClusterOnce
from securecluster.protocols.common.averages.cluster_once import (
    ClusterOnceState as ClusterOnceState,
)
from securecluster.protocols.common.averages.model_set_protocol import (
    ModelSetProtocol as ModelSetProtocol,
)
from securecluster.protocols.common.averages.model_set_protocol import (
    ModelSetState as ModelSetState,
)
from securecluster.protocols.common.averages.model_set_protocol import (
    deliver_models as deliver_models,
)
from securecluster.protocols.common.averages.model_set_protocol import send_models as send_models
from securecluster.protocols.common.averages.model_sets import AssignedModel as AssignedModel
from securecluster.protocols.common.averages.model_sets import (
    AssignedModelClient as AssignedModelClient,
)
from securecluster.protocols.common.averages.model_sets import ModelAverages as ModelAverages
from securecluster.protocols.common.averages.model_sets import ModelSetClient as ModelSetClient
from securecluster.protocols.common.averages.pending_updates import PendingUpdates as PendingUpdates
from securecluster.protocols.common.averages.pending_updates import flush as flush
from securecluster.protocols.common.averages.pending_updates import request_model as request_model
from securecluster.protocols.common.averages.restarts import OfferedModels as OfferedModels
from securecluster.protocols.common.averages.restarts import Restart as Restart
from securecluster.protocols.common.averages.sampling import TRIES as TRIES
from securecluster.protocols.common.averages.sampling import check_compared as check_compared
from securecluster.protocols.common.averages.sampling import check_landmarks as check_landmarks
from securecluster.protocols.common.averages.sampling import sample_clients as sample_clients
from securecluster.protocols.common.base import ClusteringProtocol as ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient as TrainingClient
from securecluster.protocols.common.client import UpdateClient as UpdateClient
from securecluster.protocols.common.client import late_request_error as late_request_error
from securecluster.protocols.common.client_tensors import ClientTensor as ClientTensor
from securecluster.protocols.common.comparison.eigenvectors import (
    EigenvectorClient as EigenvectorClient,
)
from securecluster.protocols.common.comparison.eigenvectors import (
    EigenvectorOptions as EigenvectorOptions,
)
from securecluster.protocols.common.comparison.eigenvectors import (
    EigenvectorProtocol as EigenvectorProtocol,
)
from securecluster.protocols.common.comparison.eigenvectors import Eigenvectors as Eigenvectors
from securecluster.protocols.common.comparison.gradient_signatures import (
    SignatureClient as SignatureClient,
)
from securecluster.protocols.common.declaration import protocol as protocol
from securecluster.protocols.common.disclosures import Disclosures as Disclosures
from securecluster.protocols.common.disclosures import OfPlainSums as OfPlainSums
from securecluster.protocols.common.hooks import check_phase_over as check_phase_over
from securecluster.protocols.common.messages import MOST_SAMPLES as MOST_SAMPLES
from securecluster.protocols.common.messages import AverageDeltas as AverageDeltas
from securecluster.protocols.common.messages import ModelChoice as ModelChoice
from securecluster.protocols.common.messages import ModelDelta as ModelDelta
from securecluster.protocols.common.messages import Update as Update
from securecluster.protocols.common.messages import empty_tensor as empty_tensor
from securecluster.protocols.common.newcomers import check_newcomers as check_newcomers
from securecluster.protocols.common.newcomers import joint_model_message as joint_model_message
from securecluster.protocols.common.observer import Observer as Observer
from securecluster.protocols.common.options.privacy_options import CLIP_BOUNDS as CLIP_BOUNDS
from securecluster.protocols.common.options.privacy_options import SMALLEST_RATIO as SMALLEST_RATIO
from securecluster.protocols.common.options.privacy_options import PrivacyOptions as PrivacyOptions
from securecluster.protocols.common.options.signature_options import (
    GradientSignatureOptions as GradientSignatureOptions,
)
from securecluster.protocols.common.options.sum_options import LARGEST_LOSS as LARGEST_LOSS
from securecluster.protocols.common.options.sum_options import SumOptions as SumOptions
from securecluster.protocols.common.options.sum_options import SumsOverAll as SumsOverAll
from securecluster.protocols.common.options.training_options import (
    TrainingOptions as TrainingOptions,
)
from securecluster.protocols.common.published import Additions as Additions
from securecluster.protocols.common.published import Published as Published
from securecluster.runtime.call_context import CallContext as CallContext
from securecluster.runtime.endpoint import GATHER as GATHER
from securecluster.runtime.endpoint import MINIMUM as MINIMUM
from securecluster.runtime.endpoint import PAIRS as PAIRS
from securecluster.runtime.endpoint import SUM as SUM
from securecluster.runtime.endpoint import answers as answers
from securecluster.runtime.run import Line as Line
from securecluster.runtime.run import Run as Run
from securecluster.runtime.server_channel import ServerChannel as ServerChannel
from securecluster.training.config import FULL_GRADIENT as FULL_GRADIENT
from securecluster.training.evaluation import EVALUATED as EVALUATED
from securecluster.training.local_trainer import LinearTerm as LinearTerm
from securecluster.training.local_trainer import LocalTrainer as LocalTrainer
from securecluster.training.local_trainer import LocalTraining as LocalTraining
from securecluster.training.local_trainer import MeanRegularizer as MeanRegularizer
