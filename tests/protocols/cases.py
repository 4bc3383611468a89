"""Small protocols, ways to protect them, federations and servers that tests share.

`build` makes a protocol with the smallest hyper-parameters that still reach every phase of it;
`variant` one of the variants that tests name in their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest

from securecluster import Federation, LabelSwap
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    FLUX,
    IFCA,
    MRMTL,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
    Signature,
)
from securecluster.protocols.conformance.simulation import Lost as Lost
from securecluster.protocols.conformance.simulation import Served as Served
from securecluster.protocols.conformance.simulation import framed as framed
from securecluster.protocols.conformance.simulation import interrupt_after as interrupt_after
from securecluster.protocols.conformance.simulation import no_client as no_client
from securecluster.protocols.conformance.simulation import node_each as node_each
from securecluster.protocols.conformance.simulation import run_server as run_server
from securecluster.protocols.conformance.simulation import serve as serve
from securecluster.protocols.conformance.simulation import serve_nodes as serve_nodes
from securecluster.protocols.conformance.simulation import with_authority as with_authority
from securecluster.protocols.nsim import synthetic_users
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.random_walks import Format
from securecluster.protocols.nsim.similarity_model import fit

Protocol = type[ClusteringProtocol]
Parameters = dict[str, Any]

FULL = Settings(transcript="full")
DOUBLE = Settings(dtype="float64")

# Masks, and the ways of differential privacy
MASKS = ("permutation", "signed-permutation", "rotation", "haar")
WAYS: dict[str, Parameters] = {
    "client": {"dp_unit": "client"},
    "central": {"dp_unit": "client", "placement": "central"},
    "example": {"dp_unit": "example"},
}
# the command line's options for the smallest federation
SMALL_FEDERATION = ["--clients", "6", "--clusters", "2", "--samples", "24", "--model", "linear"]
NOISE: Parameters = {"clip": 1.0, "noise": 0.7}


def digit_users(form: Format, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users of NSIM for images of digits, whose labels differ by user."""
    return [
        (draw.random((20, 1, 8, 8)).astype(np.float32), draw.integers(k % 9, 10, 20))
        for k in range(users)
    ]


SYNTHETIC_USERS = 8
SMALL: dict[Protocol, Parameters] = {
    CFL: {},
    CFLGP: {"k": 2, "cluster_rounds": 3},
    CLoVE: {"k": 2},
    RDPCFL: {"k": 2},
    FLHC: {"pre_rounds": 1},
    FLUX: {"pre_rounds": 1, "k": 2},
    FedAvg: {},
    FineTune: {"tune_rounds": 1},
    Hidden: {"k": 2, "aggregation": "plain"},
    IFCA: {"k": 2, "starts": 2, "start_rounds": 1},
    Local: {},
    LocalKMeans: {"k": 2, "local_rounds": 1},
    MRMTL: {},
    NSIM: {
        "synthetic": SYNTHETIC_USERS, "walks": digit_users, "radius": 0.0, "layer": "last",
        "local_rounds": 1, "eps": 1.0,
    },
    OneShot: {"tasks": 2},
    PACFL: {"k": 2},
    RandomClusters: {"k": 2},
    SRFCA: {"local_rounds": 1, "refine": 1},
    Signature: {"k": 2},
}  # fmt: skip
EVERY_PROTOCOL = tuple(SMALL)
AVERAGING = tuple(protocol for protocol in SMALL if protocol is not Local)
ONE_MODEL = tuple(p for p in AVERAGING if p not in (CFLGP, CLoVE, FineTune, IFCA, RDPCFL, SRFCA))

# CFL with limits that let it split in its first rounds
SPLITTING: Parameters = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}
SKETCH: Parameters = {"sketch": 64}
# gradient signatures in place of updates; their noise is so small that clusters of few samples show
GRADIENTS: Parameters = {"signature": "gradient", "signature_blocks": "plain"}
PRIVATE_GRADIENTS: Parameters = {**GRADIENTS, "signature_noise": 0.02}
VARIANTS: dict[str, tuple[Protocol, Parameters]] = {
    "cfl": (CFL, SPLITTING),
    "cfl gradient": (CFL, {**SPLITTING, "similarity": "gradient"}),
    "cfl sketch": (CFL, {**SPLITTING, **SKETCH}),
    "cfl sketch average": (CFL, {**SPLITTING, **SKETCH, "clusterer": "average"}),
    "cfl compress": (CFL, {**SPLITTING, "compress": "8bit", "average": "weighted"}),
    "cfl fallback": (CFL, {**SPLITTING, "fallback": 0.3}),
    "cfl signature": (CFL, PRIVATE_GRADIENTS),
    "flhc": (FLHC, {}),
    "flhc apart": (FLHC, {"threshold": 0.0}),  # leaves every client alone
    "flhc 4bit": (FLHC, {"compress": "4bit"}),
    "flhc sketch": (FLHC, {**SKETCH, "compress": "8bit"}),
    "flhc sketch spectral": (FLHC, {**SKETCH, "compress": "8bit", "clusterer": "spectral"}),
    "flhc signature": (FLHC, PRIVATE_GRADIENTS),
    "srfca": (SRFCA, {}),
    "srfca l2": (SRFCA, {"distance": "l2"}),
    "srfca trim": (SRFCA, {"trim": 0.2}),
    "srfca sealed": (SRFCA, {"sealed": True, "variant": "gradient"}),
    "oneshot": (OneShot, {}),
    "oneshot noise": (OneShot, {"gram_noise": 0.7}),
    "oneshot sealed": (OneShot, {"sealed": True}),
    "oneshot hierarchical": (OneShot, {"gps_every": 1}),
    "pacfl": (PACFL, {}),
    "pacfl noise": (PACFL, {"gram_noise": 0.7}),
    "signature": (Signature, {"signature_blocks": "plain"}),
    "signature noise": (Signature, {"signature_blocks": "plain", "signature_noise": 0.7}),
    "signature blocks": (Signature, {"signature_blocks": "blocks", "signature_noise": 0.7}),
    "signature auto": (Signature, {"signature_noise": 0.7}),
    "nsim": (NSIM, {}),
    "nsim apart": (NSIM, {"eps": 0.0}),  # leaves every client alone
    "nsim independent": (NSIM, {"init": "independent"}),
    "hidden": (Hidden, {}),
    "hidden residuals": (Hidden, {"residuals": True}),
    "hidden labels": (Hidden, {"points": "labels"}),
    "hidden momentum": (Hidden, {"momentum": 0.5, "keep_momentum": True}),
    "ifca": (IFCA, {}),
    "clove": (CLoVE, {"stable_rounds": 2}),
    "cflgp": (CFLGP, {}),
    "rdpcfl": (RDPCFL, {}),
    "flux": (FLUX, {}),
    "flux labels": (FLUX, {"newcomers_by": "labels"}),
    "local-kmeans": (LocalKMeans, {}),
    "random": (RandomClusters, {}),
    "fedavg": (FedAvg, {}),
    "fedavg momentum": (FedAvg, {"momentum": 0.5, "keep_momentum": True}),
    "finetune": (FineTune, {}),
    "mrmtl": (MRMTL, {}),
    "local": (Local, {}),
}


def build(protocol: Protocol, **params: Any) -> Any:
    """Return a protocol with small parameters; a mask or anything else in `params` goes first."""
    small = dict(SMALL[protocol])
    if protocol in (FLHC, FLUX) and "rounds" in params:
        small["pre_rounds"] = min(small["pre_rounds"], params["rounds"] - 1)
    if protocol is IFCA and "rounds" in params:
        small["starts"] = min(small["starts"], params["rounds"])
    return protocol(**{**small, **params})


def variant(name: str, **params: Any) -> Any:
    """Return the variant of a protocol that has this name in `VARIANTS`."""
    protocol, own = VARIANTS[name]
    return build(protocol, **{**own, **params})


# Pairs of protocol and mask that reach each protocol plain and under its default mask, each mask
# under one protocol whose updates are read one by one and one that needs sums alone, and the
# rotation, which widens rows, where other messages than updates are masked.
COVERED = {(protocol, "none") for protocol in EVERY_PROTOCOL}
COVERED |= {(protocol, "permutation") for protocol in AVERAGING}
COVERED |= {(protocol, mask) for protocol in (CFL, FedAvg) for mask in MASKS}
COVERED |= {(protocol, "rotation") for protocol in (OneShot, SRFCA)}


def covering(
    pairs: Iterable[tuple[Any, str]], covered: Collection[tuple[Any, str]] = COVERED
) -> list[Any]:
    """Return a product of protocols and masks, or ways, whose uncovered pairs need --exhaustive."""
    return [pair if pair in covered else exhaustive(*pair) for pair in pairs]


def seeds(default: int, of: int) -> list[Any]:
    """Return seeds, of which all but the first few run with --exhaustive alone."""
    return [*range(default), *(exhaustive(seed) for seed in range(default, of))]


def exhaustive(*case: Any) -> Any:
    """Return a case that runs with --exhaustive alone."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def two_clusters(clients: int, samples: int, seed: int = 0) -> Federation:
    """Return digits of two clusters that swap labels."""
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=clients, samples=samples, seed=seed
    )


def stub_pair_network(patch: pytest.MonkeyPatch) -> None:
    """Let NSIM's pair network hardly train, where nothing depends on what it predicts."""

    def hardly(rows: Any, true: Any, draws: Any, grid: Any = None, networks: int = 1) -> Any:
        return fit(rows, true, draws, grid=(PairNetworkConfig(steps=3),), networks=1)

    patch.setattr(synthetic_users, "fit", hardly)
