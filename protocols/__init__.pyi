"""The names of this package with their types, which it reads from here."""

from securecluster.protocols.cfl.protocol import CFL as CFL
from securecluster.protocols.common.base import ClusteringProtocol as ClusteringProtocol
from securecluster.protocols.contrib.cflgp import CFLGP as CFLGP
from securecluster.protocols.contrib.clove import CLoVE as CLoVE
from securecluster.protocols.contrib.flux.protocol import FLUX as FLUX
from securecluster.protocols.contrib.mrmtl import MRMTL as MRMTL
from securecluster.protocols.contrib.pacfl import PACFL as PACFL
from securecluster.protocols.contrib.rdpcfl import RDPCFL as RDPCFL
from securecluster.protocols.fedavg import FedAvg as FedAvg
from securecluster.protocols.finetune import FineTune as FineTune
from securecluster.protocols.flhc import FLHC as FLHC
from securecluster.protocols.hidden.protocol import Hidden as Hidden
from securecluster.protocols.ifca.protocol import IFCA as IFCA
from securecluster.protocols.local import Local as Local
from securecluster.protocols.local_kmeans import LocalKMeans as LocalKMeans
from securecluster.protocols.nsim.protocol import NSIM as NSIM
from securecluster.protocols.oneshot.protocol import OneShot as OneShot
from securecluster.protocols.random_clusters import RandomClusters as RandomClusters
from securecluster.protocols.signature import Signature as Signature
from securecluster.protocols.srfca.protocol import SRFCA as SRFCA
from securecluster.runtime.settings import Settings as Settings

MODULES_APART: bool
