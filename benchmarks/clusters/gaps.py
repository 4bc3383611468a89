"""Count how often FL+HC's default threshold finds the true clusters.

python -m benchmarks.clusters.gaps [--seeds 10] [--rounds 10]

Every metric and linkage is measured on IID clients, which are one cluster, and on clients with
known clusters. The updates are those of one clustering round after `--rounds` rounds of FedAvg,
taken from the transcript; all pairs of metric and linkage cluster the same updates. `possible`
counts runs in which some cut of the merges gives the true clusters. Image sets are read from
SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from benchmarks.grid import counts
from benchmarks.table import tabulate
from securecluster import Federation
from securecluster.clustering.agglomerative import (
    EUCLIDEAN,
    LINKAGES,
    POINTS,
    cut,
    gap_of,
    heights,
    merges,
)
from securecluster.clustering.distances import METRICS, alike, distances
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noise_robust import default_threshold
from securecluster.core.lazy_torch import torch
from securecluster.data.scenarios import scenario
from securecluster.protocols import FLHC, Settings

SCENARIOS = ("iid", "label-swap", "rotation", "label-permutation")


def _settings() -> list[dict[str, Any]]:
    """Return data, scenario and clients of every federation, in the order of the table."""
    settings: list[dict[str, Any]] = []
    digits: dict[str, Any] = {"data": "digits"}
    for name in SCENARIOS:
        settings.append({**digits, "scenario": name, "clients": 20})
    # fewer than four clients are one cluster at the default threshold, whatever their updates
    for clients in (2, 4, 6):
        iid = {**digits, "scenario": "iid", "clients": clients, "samples": 60}
        settings.append(iid)
    for clients in (4, 6):
        swap = {**digits, "scenario": "label-swap", "clients": clients, "samples": 60}
        swap["clusters"] = 2
        settings.append(swap)
    mnist: dict[str, Any] = {"data": "mnist"}
    for name in SCENARIOS:
        settings.append({**mnist, "scenario": name, "clients": 20, "samples": 200})
    # the paper's number of clients (Briggs et al. 2020)
    for name in ("iid", "label-swap"):
        settings.append({**mnist, "scenario": name, "clients": 100, "samples": 100})
    return settings


def _pairs() -> list[tuple[str, str]]:
    """Return every metric with the linkages that are defined for it."""
    pairs = []
    for metric in METRICS:
        for linkage in LINKAGES:
            # Euclidean linkages need points, which other metrics do not have
            if metric in POINTS or linkage not in EUCLIDEAN:
                pairs.append((metric, linkage))
    return pairs


SETTINGS = _settings()
PAIRS = _pairs()


def updates(federation: Federation, rounds: int) -> torch.Tensor:
    """Return all clients' updates (m, d) in the clustering round.

    Args:
        federation: the clients.
        rounds: of FedAvg before the clustering round.
    """
    protocol = FLHC(rounds=rounds + 1, pre_rounds=rounds, mask="none")
    fitted = protocol.fit(federation, Settings(transcript="full", keys_from_seed=True))
    entries = fitted.transcript_.entries
    # updates are sent one by one in the clustering round only
    methods = [entry.method for entry in entries]
    position = methods.index("train")
    _, answer = fitted.transcript_.content(position)
    # as in Briggs et al. 2020: local weights after the round less the global ones, of every client
    rows: torch.Tensor = answer.reply.delta.values
    return rows


def judge(rows: torch.Tensor, truth: tuple[int, ...], metric: str, linkage: str) -> dict[str, Any]:
    """Cluster updates at the default threshold.

    Args:
        rows: the clients' updates, (m, d).
        truth: the clients' true clusters.
        metric: of distances between updates.
        linkage: of the merges.

    Returns:
        Whether the threshold gives the true clusters (exact), ari, the number of clusters, whether
        any threshold gives the true ones (possible), and the gap at the true clusters.
    """
    pair_distances = distances(rows, metric).cpu().numpy()
    tree = merges(pair_distances, linkage)
    cosines = alike(rows, "cosine").cpu().numpy()
    # the largest gap of heights if it is large, else a test of cosines against clients without
    # clusters (not in the paper, which fixes a threshold for each setting)
    threshold = default_threshold(tree, gap_of(metric, linkage), cosines, linkage, seed=0)
    labels = cut(tree, threshold)
    tree_heights = heights(tree)
    possible = False
    # at height zero nothing is merged, which is right where every client is a cluster
    for height in (0.0, *tree_heights):
        if agreement(cut(tree, height), truth)["exact"]:
            possible = True
            break
    ari = agreement(labels, truth)["ari"]
    return {
        "exact": ari == 1,
        "ari": round(ari, 4),
        "clusters": 1 + max(labels),
        "possible": possible,
        "gap_at_truth": _gap_at(tree_heights, truth),
    }


def _gap_at(tree_heights: Sequence[float] | NDArray[Any], truth: tuple[int, ...]) -> float | None:
    """Return the ratio of the two merges that a cut at the true number of clusters separates.

    Args:
        tree_heights: of the m - 1 merges, ascending.
        truth: the m clients' true clusters.

    Returns:
        None for one cluster and for m clusters, where no merge lies on one of the sides.
    """
    clusters = len(set(truth))
    if not 1 < clusters < len(truth):
        return None
    first_above = tree_heights[-clusters + 1]
    last_below = tree_heights[-clusters]
    ratio = float(first_above / last_below)
    return round(ratio, 3)


def measure(setting: dict[str, Any], seed: int, rounds: int) -> list[dict[str, Any]]:
    """Return a line of the table for each pair of metric and linkage on one federation.

    Args:
        setting: one of `SETTINGS`.
        seed: of the federation.
        rounds: of FedAvg before the clustering round.
    """
    params: dict[str, Any] = {}
    for name in ("data", "clients", "samples"):
        # without a number of samples, all samples of a data set are dealt
        params[name] = setting.get(name)
    clusters = scenario(setting["scenario"], setting.get("clusters"))
    federation = Federation.simulate(**params, scenario=clusters, seed=seed)
    rows = updates(federation, rounds)
    key = {**params, "scenario": setting["scenario"], "rounds": rounds, "seed": seed}
    truth = federation.truth or ()
    lines = []
    for metric, linkage in PAIRS:
        results = judge(rows, truth, metric, linkage)
        lines.append({**key, "metric": metric, "linkage": linkage, **results})
    return lines


def main() -> None:
    """Run, write after each setting, print counts."""
    # n = 10, as in Tables IV–VI of Briggs et al. 2020, which compare metrics and linkages
    options = counts(__doc__, seeds=10, rounds=10)
    measured = (
        measure(setting, seed, options.rounds)
        for setting in SETTINGS
        for seed in range(options.seeds)
    )
    by = ("data", "scenario", "clients", "metric", "linkage")
    print(tabulate("gaps", measured, by, counted=("exact", "possible")))


if __name__ == "__main__":
    main()
