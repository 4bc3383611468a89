"""The names of this package with their types, which it reads from here."""

from securecluster.data.datasets import SOURCES as SOURCES
from securecluster.data.datasets import Source as Source
from securecluster.data.federation import Federation as Federation
from securecluster.data.federation import Shard as Shard
from securecluster.data.scenarios import SCENARIOS as SCENARIOS
from securecluster.data.scenarios import ClientDirichlet as ClientDirichlet
from securecluster.data.scenarios import Combined as Combined
from securecluster.data.scenarios import Dirichlet as Dirichlet
from securecluster.data.scenarios import Iid as Iid
from securecluster.data.scenarios import Inversion as Inversion
from securecluster.data.scenarios import LabelPermutation as LabelPermutation
from securecluster.data.scenarios import LabelSplit as LabelSplit
from securecluster.data.scenarios import LabelSwap as LabelSwap
from securecluster.data.scenarios import Natural as Natural
from securecluster.data.scenarios import Pathological as Pathological
from securecluster.data.scenarios import Rotation as Rotation
from securecluster.data.scenarios import Scenario as Scenario
from securecluster.data.scenarios import Tasks as Tasks
from securecluster.data.scenarios import Topics as Topics
from securecluster.data.splits import Split as Split

__all__: list[str]
