"""The public names with their types, which the package reads from here."""

from securecluster import plot as plot
from securecluster.audits.recording_audit import audit_recording as audit_recording
from securecluster.audits.run_audit import audit as audit
from securecluster.core.client_names import at as at
from securecluster.data import ClientDirichlet as ClientDirichlet
from securecluster.data import Dirichlet as Dirichlet
from securecluster.data import Federation as Federation
from securecluster.data import Iid as Iid
from securecluster.data import Inversion as Inversion
from securecluster.data import LabelPermutation as LabelPermutation
from securecluster.data import LabelSplit as LabelSplit
from securecluster.data import LabelSwap as LabelSwap
from securecluster.data import Natural as Natural
from securecluster.data import Pathological as Pathological
from securecluster.data import Rotation as Rotation
from securecluster.data import Split as Split
from securecluster.data import Tasks as Tasks
from securecluster.errors import SecureClusterError as SecureClusterError
from securecluster.errors import SecureClusterWarning as SecureClusterWarning
from securecluster.models.foreign import ForeignModel as ForeignModel
from securecluster.parties.run_check import power_check as power_check
from securecluster.protocols import *  # noqa: F403
from securecluster.recordings.recording import recorded as recorded
from securecluster.recordings.recording import recorded_client as recorded_client
from securecluster.recordings.training_facts import TrainingFacts as TrainingFacts
from securecluster.reports.loading import load as load
from securecluster.reports.loading import open_transcript as open_transcript
from securecluster.results.estimator import ClusteredClassifier as ClusteredClassifier
from securecluster.studies.field import field as field
from securecluster.studies.plan import plan as plan
from securecluster.studies.sweep import sweep as sweep

__version__: str
__all__: list[str]
