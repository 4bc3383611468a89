"""The published methods, one file each. They never import each other."""

from securecluster.protocols.base import Protocol
from securecluster.protocols.cfl import CFL
from securecluster.protocols.fedavg import FedAvg
from securecluster.protocols.finetune import FineTune
from securecluster.protocols.flhc import FLHC
from securecluster.protocols.ifca import IFCA
from securecluster.protocols.local import Local
from securecluster.protocols.local_kmeans import LocalKMeans
from securecluster.protocols.nsim import NSIM
from securecluster.protocols.oneshot import OneShot
from securecluster.protocols.random_clusters import RandomClusters
from securecluster.protocols.srfca import SRFCA

from securecluster.settings import Settings

__all__ = [
    "CFL",
    "FLHC",
    "IFCA",
    "NSIM",
    "SRFCA",
    "FedAvg",
    "FineTune",
    "Local",
    "LocalKMeans",
    "OneShot",
    "Protocol",
    "RandomClusters",
    "Settings",
]
