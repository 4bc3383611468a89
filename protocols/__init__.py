"""The published methods, one file or package each. They never import each other."""

from securecluster.protocols.cfl.protocol import CFL
from securecluster.protocols.clove import CLoVE
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.fedavg import FedAvg
from securecluster.protocols.finetune import FineTune
from securecluster.protocols.flhc import FLHC
from securecluster.protocols.hidden.protocol import Hidden
from securecluster.protocols.ifca.protocol import IFCA
from securecluster.protocols.local import Local
from securecluster.protocols.local_kmeans import LocalKMeans
from securecluster.protocols.mrmtl import MRMTL
from securecluster.protocols.nsim.protocol import NSIM
from securecluster.protocols.oneshot.protocol import OneShot
from securecluster.protocols.pacfl import PACFL
from securecluster.protocols.random_clusters import RandomClusters
from securecluster.protocols.rdpcfl import RDPCFL
from securecluster.protocols.signature import Signature
from securecluster.protocols.srfca.protocol import SRFCA
from securecluster.runtime.settings import Settings

MODULES_APART = True
"""No method's program depends on the modules of others (`securecluster.runs.program`)."""

__all__ = [
    "CFL",
    "FLHC",
    "IFCA",
    "MRMTL",
    "NSIM",
    "PACFL",
    "RDPCFL",
    "SRFCA",
    "CLoVE",
    "ClusteringProtocol",
    "FedAvg",
    "FineTune",
    "Hidden",
    "Local",
    "LocalKMeans",
    "OneShot",
    "RandomClusters",
    "Settings",
    "Signature",
]
