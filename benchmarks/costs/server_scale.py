"""Measure seconds and peak memory of clustering many clients, beside scipy and scikit-learn.

python -m benchmarks.costs.server_scale sketches [--clients 100 1000 …]
python -m benchmarks.costs.server_scale protocols [--clients 1000 …] [--cases …]

"sketches" clusters rows of 64 numbers: four directions in equal parts, with noise in every row.
"protocols" runs whole protocols, clients and server in one process, with a linear model of four
features and four samples a client. Each case runs in a process of its own, since the largest
resident set of a process never falls. `benchmarks.ratios` times single calls of such clients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.costs.own_process import GIB, line_of, peak
from benchmarks.table import write
from securecluster import Federation
from securecluster.clustering.landmarks import sketch_clusters
from securecluster.clustering.metrics import agreement
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    IFCA,
    MRMTL,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    ClusteringProtocol,
    FedAvg,
    Hidden,
    OneShot,
    RandomClusters,
    Signature,
)
from securecluster.protocols.common.averages.averaging import AveragingState, average_clusters
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import InProcess

WIDTH = 64  # numbers of a sketch
CLUSTERS = 4
# standard deviation of the noise in each number of a row whose direction has norm 1
NOISE = 0.25
LANDMARKS = 500  # sketches that are compared with each other
COMPARED = 100  # clients that are compared with each other by a protocol
AVAILABLE_GIB = 4  # cases that need more are not run
MIB_A_GIB = 1024
LIMIT_S = 600  # of one case
CALLS = 4  # of which the first one has the key agreement

# rounds that reach each protocol's clustering
PROTOCOLS: dict[str, Callable[..., ClusteringProtocol]] = {
    "fedavg": partial(FedAvg, rounds=1),
    "random": partial(RandomClusters, rounds=1, k=2),
    "mrmtl": partial(MRMTL, rounds=1),
    "ifca": partial(IFCA, rounds=1, k=2, starts=1),
    "hidden": partial(Hidden, rounds=1, k=2),
    "clove": partial(CLoVE, rounds=1, k=2),
    "rdpcfl": partial(RDPCFL, rounds=1),
    "signature": partial(Signature, rounds=1, k=2),
    "pacfl": partial(PACFL, rounds=1, k=2),
    "cflgp": partial(CFLGP, rounds=1, k=2),
    "flhc": partial(FLHC, rounds=2, pre_rounds=1),
    "cfl": partial(CFL, rounds=1),
    "oneshot": partial(OneShot, rounds=1, tasks=2, vectors=2),
    "srfca": partial(SRFCA, rounds=1, local_rounds=1, refine=1),
}
# protocols that compare clients pair by pair, with the most clients that are measured
COMPARING = {
    "flhc": 2000,
    "cfl": 2000,
    "oneshot": 2000,
    "srfca": 2000,
    "pacfl": 2000,
    "cflgp": 2000,
    "srfca landmarks": 10_000,
    "signature": 10_000,
}
# those of them that can compare a sample of the clients
WITH_LANDMARKS = ("flhc", "cfl", "oneshot", "srfca")


def few_samples(clients: int) -> Federation:
    """Return clients of two tasks with four samples of four features each.

    Args:
        clients: how many.
    """
    rng = np.random.default_rng(0)
    train = {}
    for k in range(clients):
        features = rng.standard_normal((4, 4)).astype(np.float32)
        # the tasks differ in where the data vary, and in the sign of the labels
        task = k % 2
        features[:, task] *= 4
        positive = features.sum(1) > 0
        labels = (positive ^ bool(task)).astype(np.int64)
        train[f"c{k}"] = (features, labels)
    return Federation.from_arrays(train, test=train, classes=2, seed=0)


def run_protocol(case: str, clients: int) -> dict[str, Any]:
    """Run a protocol in this process, and return its line of the table.

    Args:
        case: one of `PROTOCOLS`, followed by " landmarks" to compare `COMPARED` clients only.
        clients: how many.
    """
    name, *landmarks = case.split()
    params: dict[str, Any] = {"model": "linear", "epochs": 1, "batch_size": 4}
    if landmarks:
        params["landmarks"] = COMPARED
    federation = few_samples(clients)
    before = peak()
    start = time.perf_counter()
    processor_start = time.process_time()
    protocol = PROTOCOLS[name](**params)
    settings = Settings(transcript="none", keys_from_seed=True)
    fitted = protocol.fit(federation, settings)
    seconds = time.perf_counter() - start
    processor_seconds = time.process_time() - processor_start
    return {
        "case": case,
        "clients": clients,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(processor_seconds, 1),
        "before_mib": round(before * MIB_A_GIB),
        "peak_mib": round(peak() * MIB_A_GIB),
        "up_bytes": fitted.bytes_["up"],
        "down_bytes": fitted.bytes_["down"],
        "status": "done",
    }


def seconds_of_calls(case: str, clients: int) -> Iterator[float]:
    """Call all clients once per round of FedAvg, and yield the processor seconds of each call.

    Args:
        case: the mask.
        clients: how many.
    """
    method = FedAvg(model="linear", epochs=1, batch_size=4, mask=case, rounds=CALLS)
    federation = few_samples(clients)
    settings = Settings(transcript="none", keys_from_seed=True)
    endpoint = build_client(method, federation, settings)
    config = method.config(federation, "float32")
    transport = InProcess(endpoint.answer, lambda call: set())
    net = build_network(method, transport, config)
    state = AveragingState([0] * clients, PendingUpdates.start(clients, fresh=case != "none"))
    for t in range(1, CALLS + 1):
        net.round = t
        start = time.process_time()
        average_clusters(net, state, 1.0, t)
        yield time.process_time() - start


def sketches(clients: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return sketches with noise, and the true cluster of each.

    Args:
        clients: how many.
    """
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLUSTERS, WIDTH))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    truth = np.arange(clients) % CLUSTERS
    noise = NOISE * rng.standard_normal((clients, WIDTH), dtype=np.float32)
    rows = centres[truth].astype(np.float32) + noise
    return rows, truth


def _landmarks(rows: NDArray[np.float32]) -> Any:
    import torch

    return sketch_clusters(torch.from_numpy(rows), LANDMARKS, count=CLUSTERS)


def _all_pairs(rows: NDArray[np.float32]) -> Any:
    import torch

    # with as many landmarks as rows
    return sketch_clusters(torch.from_numpy(rows), len(rows), count=CLUSTERS)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows of norm 1, whose Euclidean distances are chords."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / norms, dtype=np.float32)


def _scipy_ward(rows: NDArray[np.float32]) -> Any:
    from scipy.cluster.hierarchy import fcluster, linkage

    return fcluster(linkage(_unit(rows), "ward"), CLUSTERS, "maxclust")


def _sklearn_ward(rows: NDArray[np.float32]) -> Any:
    from sklearn.cluster import AgglomerativeClustering

    return AgglomerativeClustering(CLUSTERS, linkage="ward").fit_predict(_unit(rows))


def _sklearn_kmeans(rows: NDArray[np.float32]) -> Any:
    from sklearn.cluster import KMeans

    return KMeans(CLUSTERS, n_init=10, random_state=0).fit_predict(_unit(rows))


def _sklearn_minibatch(rows: NDArray[np.float32]) -> Any:
    from sklearn.cluster import MiniBatchKMeans

    return MiniBatchKMeans(CLUSTERS, n_init=10, random_state=0).fit_predict(_unit(rows))


# a method, and how many float64 numbers it holds for each pair of clients
METHODS: dict[str, tuple[Callable[[NDArray[np.float32]], Any], float]] = {
    "securecluster, 500 landmarks": (_landmarks, 0),
    # the distances in the memory of the Gram matrix, and scipy's condensed copy of them
    "securecluster, all pairs": (_all_pairs, 1.5),
    # the condensed distances, and a copy of them
    "scipy linkage ward": (_scipy_ward, 1),
    "scikit-learn ward": (_sklearn_ward, 1),
    "scikit-learn KMeans": (_sklearn_kmeans, 0),
    "scikit-learn MiniBatchKMeans": (_sklearn_minibatch, 0),
}


def cluster_sketches(case: str, clients: int) -> dict[str, Any]:
    """Cluster sketches in this process, and return the line of the table.

    Args:
        case: one of `METHODS`.
        clients: how many.
    """
    method, _ = METHODS[case]
    # imports are no part of the time
    method(sketches(20)[0])
    rows, truth = sketches(clients)
    before = peak()
    start = time.perf_counter()
    labels = np.asarray(method(rows))
    seconds = time.perf_counter() - start
    # measured before the score, whose tables are no part of the method
    largest = peak()
    ari = agreement(labels.tolist(), truth.tolist())["ari"]
    return {
        "case": case,
        "clients": clients,
        "seconds": round(seconds, 2),
        "before_mib": round(before * MIB_A_GIB),
        "peak_mib": round(largest * MIB_A_GIB),
        "ari": round(ari, 3),
        "status": "done",
    }


def needed_gib(case: str, clients: int) -> float:
    """Return the size of the pairs' numbers that a method of sketches holds, in GiB.

    Args:
        case: one of `METHODS`.
        clients: how many.
    """
    _, numbers = METHODS[case]
    bytes_per_pair = 8 * numbers  # float64
    return bytes_per_pair * clients**2 / GIB


def in_own_process(group: str, case: str, clients: int) -> dict[str, Any]:
    """Measure one case in a process of its own, within `LIMIT_S`.

    Args:
        group: "sketches" or "protocols".
        case: of this group.
        clients: how many.
    """
    skipped: dict[str, Any] = {"case": case, "clients": clients}
    if group == "sketches":
        needs = needed_gib(case, clients)
        if needs > AVAILABLE_GIB:
            return skipped | {"status": f"not run: needs {needs:.0f} GiB"}
    elif group == "protocols" and clients > COMPARING.get(case, clients):
        return skipped | {"status": "not run: all pairs"}
    # A process's largest resident set never falls, so each case needs a process of its own.
    options = [group, "--one", case, "--clients", str(clients)]
    try:
        return line_of("benchmarks.costs.server_scale", options, LIMIT_S)
    except subprocess.TimeoutExpired:
        return skipped | {"status": f"stopped after {LIMIT_S} s"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["sketches", "protocols"])
    parser.add_argument("--clients", type=int, nargs="+")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    measure = cluster_sketches
    cases = list(METHODS)
    sizes = [100, 1000, 10_000, 100_000]
    if options.part == "protocols":
        measure = run_protocol
        cases = [*PROTOCOLS, *(f"{name} landmarks" for name in WITH_LANDMARKS)]
        sizes = [1000, 10_000, 100_000]
    if options.one:
        line = measure(options.one, options.clients[0])
        print(json.dumps(line))
        return
    rows = []
    for clients in options.clients or sizes:
        for case in options.cases or cases:
            row = in_own_process(options.part, case, clients)
            rows.append(row)
            print(row, flush=True)
    # lines of cases that were not run lack columns
    columns = max(rows, key=len)
    filled = [{name: row.get(name, "") for name in columns} for row in rows]
    print(write(f"server_scale_{options.part}", filled))


if __name__ == "__main__":
    main()
