"""Twins of a run: the same run without all protections, and without one of them alone."""

from __future__ import annotations

from typing import Any

from securecluster.attacks import experiments
from securecluster.attacks.base import ENCRYPTION, HIDDEN_PAIRS, MASK, SEALS, SUMS
from securecluster.attacks.base import NOISE as NOISE
from securecluster.protocols.common.base import ClusteringProtocol

SERVERS_NOISE = "the server's noise"
CLIP = "a clip"
# by protection its options; the values of an unprotected twin are those without it
OPTIONS = {
    MASK: ("mask", "layer_mask"),
    SEALS: ("sealed",),
    SUMS: ("aggregation", "cohort_size", "sum_bound", "least_members", "lost", "colluding"),
    HIDDEN_PAIRS: ("relevance", "relevance_release"),
}
NO_NOISE: dict[str, Any] = {
    "noise": 0.0,
    "gram_noise": 0.0,
    "signature_noise": 0.0,
    "target_epsilon": None,
    "placement": "local",
}
SWITCHES = ("noise", "gram_noise", "signature_noise", "target_epsilon")


def twin_of(protocol: ClusteringProtocol) -> ClusteringProtocol:
    """Return the protocol of the twin, without mask, noise, seals and secure sums.

    Args:
        protocol: with the run's hyper-parameters.
    """
    return experiments.unprotected(protocol)


def protections_of(protocol: ClusteringProtocol) -> dict[str, Any]:
    """Return the options of a protocol that protect, with their values.

    Args:
        protocol: with the run's hyper-parameters.
    """
    plain = twin_of(protocol).get_params()
    protections = {}
    for name, value in protocol.get_params().items():
        if value != plain[name]:
            protections[name] = value
    return protections


def noiseless(protocol: ClusteringProtocol) -> ClusteringProtocol:
    """Return the protocol without noise; contributions are clipped as before.

    Args:
        protocol: with the run's hyper-parameters.
    """
    params = protocol.get_params()
    changes = {name: value for name, value in NO_NOISE.items() if name in params}
    return type(protocol)(**params | changes)


def noise_of(protocol: ClusteringProtocol) -> str:
    """Return whose noise a protocol has, in words.

    Args:
        protocol: with the run's hyper-parameters.
    """
    return SERVERS_NOISE if protocol.get_params().get("placement") == "central" else NOISE


def twins_of(protocol: ClusteringProtocol) -> dict[str, ClusteringProtocol]:
    """Return by each protection in use the protocol that is without it alone.

    Args:
        protocol: with the run's hyper-parameters.
    """
    params = protocol.get_params()
    plain = twin_of(protocol).get_params()
    twins: dict[str, ClusteringProtocol] = {}
    for protection, options in OPTIONS.items():
        changes = {name: plain[name] for name in options if params.get(name) != plain.get(name)}
        if not changes:
            continue
        if protection == HIDDEN_PAIRS and protocol.pairs.by_authority:
            protection = ENCRYPTION
        twins[protection] = type(protocol)(**params | changes)
    if any(params.get(name) for name in SWITCHES):
        twins[noise_of(protocol)] = noiseless(protocol)
    elif params.get("clip") != plain.get("clip"):
        twins[CLIP] = type(protocol)(**params | {"clip": plain["clip"]})
    return twins
