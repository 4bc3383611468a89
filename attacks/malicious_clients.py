"""Malicious clients: how they behave, and how far they move clusters and honest clients' models.

This attack is active. It reads no transcript, so it is no `Attack` of an audit: a run has to be
repeated with clients that are malicious, which `run_with` does.

Malicious clients change their data, or what leaves them in a field `delta`: updates, the models
that SR-FCA's clients trained alone, and a model that the server asks a member of a cluster for.
Everything else they send is honest: losses, choices of a cluster, and eigenvectors. They then
follow the protocol, so the clip, the mask and the sum hold for what they send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.experiments import with_colluding_updates, with_poisoned_data
from securecluster.clustering.metrics import agreement, mean
from securecluster.core.client_names import Client
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.data.federation import Shard
from securecluster.errors import unknown
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.settings import Settings

P = TypeVar("P", bound=ClusteringProtocol)
Labels = Sequence[int] | Array
# (updates of the malicious clients of a call, (k, d), draw) -> the updates that they send, (k, d)
Change = Callable[[torch.Tensor, np.random.Generator], torch.Tensor]

SCALE = 10.0  # factor of scaled updates
DEVIATIONS = 1.5  # the largest of Baruch et al.'s experiments


def sign_flipped(updates: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """Return the updates in the opposite direction."""
    return -updates


def scaled(updates: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """Return the updates times `SCALE`."""
    return SCALE * updates


def random(updates: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """Return updates in random directions, each as long as the client's own."""
    # a normalised Gaussian vector is uniform on the sphere
    normal = draw.standard_normal(tuple(updates.shape))
    directions = torch.from_numpy(normal).to(updates)
    lengths = updates.norm(dim=1, keepdim=True)
    sent: torch.Tensor = directions * (lengths / directions.norm(dim=1, keepdim=True))
    return sent


def colluding(updates: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """Return the negative mean of the colluders' updates for each of them."""
    return -updates.mean(dim=0, keepdim=True).expand_as(updates)


def inconspicuous(updates: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """Return the mean of the colluders' updates less `DEVIATIONS` standard deviations, for each.

    One colluder knows no deviation, and sends its own update.
    """
    # Within the spread of honest updates, and so below the thresholds of robust aggregation.
    center = updates.mean(dim=0, keepdim=True)
    deviation = updates.std(dim=0, correction=0, keepdim=True)
    return (center - DEVIATIONS * deviation).expand_as(updates)


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of malicious clients.

    Args:
        about: description in words.
        source: the paper that describes it.
        change: of updates; None if their data are changed instead: label y becomes C − 1 − y of C
            classes.
    """

    about: str
    source: str
    change: Change | None


BEHAVIOURS: dict[str, Behaviour] = {
    "label-flip": Behaviour(
        "trains on labels C − 1 − y in place of y",
        "Tolpegin et al. 2020, Data Poisoning Attacks Against Federated Learning Systems",
        None,
    ),
    "sign-flip": Behaviour(
        "sends −Δ in place of its update Δ",
        "Karimireddy, He, Jaggi 2022, Byzantine-Robust Learning on Heterogeneous Datasets",
        sign_flipped,
    ),
    "scaled": Behaviour(
        f"sends {SCALE:g}Δ", "Bagdasaryan et al. 2020, How To Backdoor Federated Learning", scaled
    ),
    "random": Behaviour(
        "sends Gaussian noise of the length of Δ",
        "Blanchard et al. 2017, Machine Learning with Adversaries (with longer noise)",
        random,
    ),
    "colluding": Behaviour(
        "all send the negative mean of the colluders' updates",
        "Xie, Koyejo, Gupta 2019, Fall of Empires (the inner product attack)",
        colluding,
    ),
    "inconspicuous": Behaviour(
        f"all send the mean of the colluders' updates less {DEVIATIONS:g} standard deviations",
        "Baruch, Baruch, Goldberg 2019, A Little Is Enough",
        inconspicuous,
    ),
}


def choose_clients(clients: int, share: float, seed: int) -> tuple[int, ...]:
    """Return positions of random malicious clients.

    Those of a smaller share are among those of a larger one.

    Args:
        clients: how many there are.
        share: of them that is malicious, in [0, 1], rounded to whole clients.
        seed: of the choice.
    """
    # a prefix of one permutation, so that shares are nested
    order = np.random.default_rng(seed).permutation(clients)
    chosen = order[: round(share * clients)]
    return tuple(sorted(chosen.tolist()))


def run_with(
    protocol: P,
    federation: Federation,
    behaviour: str,
    malicious: Collection[Client],
    seed: int = 0,
    settings: Settings | None = None,
) -> P:
    """Run a protocol with malicious clients.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their honest data.
        behaviour: a name of `BEHAVIOURS`.
        malicious: the malicious clients, each as for `Federation.select`.
        seed: of their draws.
        settings: of the run.

    Raises:
        UsageError: an unknown behaviour, no such client, or a number that could be a name.
    """
    if behaviour not in BEHAVIOURS:
        raise unknown("behaviour", behaviour, BEHAVIOURS)
    change = BEHAVIOURS[behaviour].change
    if change is None:
        flip = partial(_flipped, federation.classes)
        federation = with_poisoned_data(federation, malicious, flip)
    draw = np.random.default_rng(seed)

    def send(clients: tuple[int, ...], updates: torch.Tensor, round: int) -> torch.Tensor:
        if change is None:
            return updates
        return change(updates, draw)

    return with_colluding_updates(protocol, federation, malicious, send, settings)


@dataclass(frozen=True)
class Impact:
    """Effect of malicious clients on a run, and the clusters that they end up in.

    A cluster is set aside if it is not among the K largest ones, where K is the number of true
    clusters. A server that expects K groups can do so without knowing who is malicious.

    Args:
        ari: adjusted Rand index of the honest clients' clusters with the true ones.
        accuracy: mean over honest clients of the score of their own model on their test data; None
            if they have no test data.
        isolated: share of malicious clients in clusters without honest ones; None if there are no
            malicious clients.
        exposed: share of honest clients in clusters with malicious ones.
        recall: share of malicious clients that were set aside; None if there are none.
        precision: share of malicious clients among those set aside; None if nobody was.
        cast_out: share of honest clients that were set aside.
        clusters: how many the run ended with.
    """

    ari: float
    accuracy: float | None
    isolated: float | None
    exposed: float
    recall: float | None
    precision: float | None
    cast_out: float
    clusters: int


def impact(
    labels: Labels, truth: Labels, scores: Array | None, malicious: Collection[int]
) -> Impact:
    """Return what malicious clients did to a run.

    Args:
        labels: each client's cluster at the end, (m,).
        truth: each client's true cluster, (m,). Those of malicious clients do not count.
        scores: of each client's own model on its honest test data, (m,); NaN for a client without
            test data; None if nothing was evaluated.
        malicious: their numbers.
    """
    clusters = np.asarray(labels)
    is_malicious = np.isin(np.arange(len(clusters)), list(malicious))
    honest = ~is_malicious
    honest_truth = np.asarray(truth)[honest]
    agrees = agreement(clusters[honest].tolist(), honest_truth.tolist())
    accuracy = None
    if scores is not None:
        accuracy = mean(np.asarray(scores)[honest])

    # clusters that hold at least one client of the kind
    with_honest = np.isin(clusters, clusters[honest])
    with_malicious = np.isin(clusters, clusters[is_malicious])
    aside = _set_aside(clusters, len(set(honest_truth.tolist())))
    return Impact(
        ari=agrees["ari"],
        accuracy=accuracy,
        isolated=_share(~with_honest[is_malicious]),
        exposed=float(with_malicious[honest].mean()),
        recall=_share(aside[is_malicious]),
        precision=_share(is_malicious[aside]),
        cast_out=float(aside[honest].mean()),
        clusters=len(set(clusters.tolist())),
    )


def _set_aside(clusters: Array, expected: int) -> Array:
    """Return which clients are outside the largest clusters, (m,).

    Args:
        clusters: of the clients, (m,).
        expected: how many clusters are kept; of equally large ones those with the lower labels.
    """
    names, sizes = np.unique(clusters, return_counts=True)
    by_size = np.argsort(-sizes, kind="stable")
    largest = names[by_size[:expected]]
    return ~np.isin(clusters, largest)


def _share(flags: Array) -> float | None:
    """Return the share of True; None if there are no flags."""
    if not flags.size:
        return None
    return float(flags.mean())


def _flipped(classes: int, client: int, shard: Shard) -> Shard:
    """Return a client's data with label C − 1 − y in place of y, but for what it is tested on."""
    return replace(shard, y=classes - 1 - shard.y)
