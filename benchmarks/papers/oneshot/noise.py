"""Measure one-shot clusters from noisy Gram matrices over ε, which Ali & Arafa 2024 leave open.

python -m benchmarks.papers.oneshot.noise [--seeds 5] [--full] [--minutes 30]

The data are digits (two tasks) and Fashion-MNIST (three). Ten clients (`--full` 100) have 100, 300
or 1000 samples, 10 % of them of other tasks. Of the digits there are 700 in place of 1000, which is
about what their tasks have, and clients share samples from 300 on. p = 5.

The unit of privacy is one sample, blanked, and δ = 1e-5; at ε = ∞ rows are neither clipped
nor noised. There is one release of each client's Gram matrix, which is all that it releases before
training.

Features: pixels; "dct", the 16 lowest frequencies, which need no data; "pca", 16 components of
public MNIST.

Mechanisms: "gram"; "all", the same with every eigenvector counted, whether or not it is larger than
the noise; "naive", noise of std s on the eigenvectors alone, whose ε (`alone`) is by their trivial
sensitivity 2√p, while a run's is infinite, since relevance stays exact.

The ARI is measured with T given, and (`found`) without, where clients of one distribution (iid)
should be one cluster; and with T given where `spectral` clustering or `kmeans` clusters R. Seeds
are from 20 on, since no constant was chosen on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.grid import Grid, federation_of, with_seeds
from benchmarks.sheet import Cell, Row, figure, spread, summarise
from securecluster import Federation
from securecluster.clustering.eigenvectors import projected, relevance, span_relevance, top
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noise_robust import CLUSTERERS
from securecluster.core.randomness import Randomness
from securecluster.data.scenarios import Iid, Tasks
from securecluster.privacy.dp.accounting import epsilon, find_noise
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.common.comparison.gram_mechanism import GramNoise, told_by_all
from securecluster.protocols.oneshot.feature_maps import Features, build
from securecluster.protocols.oneshot.server import agglomerate
from securecluster.runtime.call_context import outside_run

Array = NDArray[np.float64]
DELTA = 1e-5
VECTORS = 5  # enough for Fashion-MNIST in the paper
CLIENTS = 10
FIRST = 20  # seed; constants were chosen on lower ones
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, float("inf"))
# of the naive mechanism, in each coordinate of a unit vector
DEVIATIONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SAMPLES = {"digits": (100, 300, 700), "fashion_mnist": (100, 300, 1000)}
FEATURES = {"digits": ("identity", "dct"), "fashion_mnist": ("identity", "dct", "pca")}
PUBLIC = "mnist"
COMPONENTS = 16
OVERLAP = 200  # clients with more samples of the digits than this share some


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return data by features by samples by mechanism by seed.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    clients = CLIENTS
    if scale != "cpu":
        clients = 10 * CLIENTS
    fixed = {"scale": scale, "clients": clients}
    settings = [{**setting, **fixed} for setting in _settings()]
    return with_seeds(settings, range(FIRST, FIRST + seeds))


def _settings() -> list[dict[str, Any]]:
    """Return the settings of one seed: those of tasks, then those of one distribution."""
    settings: list[dict[str, Any]] = []
    for data, feature_maps in FEATURES.items():
        mechanisms = ("gram", "all", "naive")
        for n, features, mechanism in product(SAMPLES[data], feature_maps, mechanisms):
            settings.append(
                {
                    "data": data,
                    "samples": n,
                    "features": features,
                    "mechanism": mechanism,
                    "scenario": "tasks",
                }
            )
    for data, sizes in SAMPLES.items():
        for n in sizes:
            settings.append(
                {
                    "data": data,
                    "samples": n,
                    "features": "dct",
                    "mechanism": "gram",
                    "scenario": "iid",
                }
            )
    return settings


def measure(cell: Cell) -> dict[str, Any]:
    """Return the ARI for each ε, or, of the naive mechanism, for each s.

    Beside the latter is the ε that its eigenvectors alone would have.

    Args:
        cell: data, scenario, features, mechanism and seed.
    """
    federation = _federation(cell)
    truth = federation.truth
    assert truth is not None
    phi = _feature_map(cell, federation)
    features = [phi(torch.from_numpy(shard.x)) for shard in federation.shards]
    draws = NoiseStreams.derived(Randomness(cell["seed"]), "oneshot_noise")
    streams = ClientNoise("example", 0.0, 0.0, 0.0, draws)
    results: dict[str, Any] = {"dimension": phi.dimension}
    if cell["mechanism"] == "naive":
        mechanism = GramNoise(1.0, "naive", False)
        return results | _naive_results(features, truth, mechanism, streams)
    mechanism = GramNoise(1.0, "gram", False)
    if cell["mechanism"] == "all":
        # also eigenvalues count that noise alone could produce
        mechanism = replace(mechanism, separation=0.0)
    for e in EPSILONS:
        noised = not np.isinf(e)
        if noised:
            r = noisy(features, replace(mechanism, multiplier=multiplier(e)), streams)
        else:
            r = exact(features)
        with_count, without = scored(r, truth, noised=noised)
        results[f"ari_{e:g}"] = with_count
        results[f"found_{e:g}"] = without
        # the clusterer "paper" is average linkage here, so spectral clustering and k-means remain
        for name in CLUSTERERS[2:]:
            with_count, _ = scored(r, truth, name)
            results[f"{name}_{e:g}"] = with_count
    return results


def _federation(cell: Cell) -> Federation:
    """Return the clients of a cell."""
    # the digits have too few samples of a task for many clients
    shared = cell["data"] == "digits" and cell["samples"] > OVERLAP
    scenario: Tasks | Iid = Iid(overlap=shared)
    if cell["scenario"] == "tasks":
        scenario = Tasks(minority=0.1, overlap=shared)
    return federation_of(cell, scenario)


def _feature_map(cell: Cell, federation: Federation) -> Features:
    """Return the feature map Φ of a cell."""
    public = None
    if cell["features"] == "pca":
        public = PUBLIC
    dimension = None
    if cell["features"] != "identity":
        dimension = COMPONENTS
    draws = Randomness(cell["seed"])
    return build(cell["features"], federation.shape, draws, public, dimension)


def _naive_results(
    features: Sequence[torch.Tensor],
    truth: Sequence[int],
    mechanism: GramNoise,
    streams: ClientNoise,
) -> dict[str, Any]:
    """Return ARI and ε of the naive mechanism for each s.

    Args:
        features: clients' features, (n_i, D) each.
        truth: the clients' tasks, (m,).
        mechanism: the noise, whose multiplier is replaced.
        streams: of the clients' noise.
    """
    # the trivial sensitivity of p unit vectors is 2√p
    sensitivity = 2 * VECTORS**0.5
    results: dict[str, Any] = {}
    for s in DEVIATIONS:
        z = s / sensitivity
        r = naive(features, replace(mechanism, multiplier=z), streams)
        with_count, _ = scored(r, truth)
        results[f"s_{s:g}"] = with_count
        results[f"alone_{s:g}"] = priced(z)
    return results


def multiplier(e: float) -> float:
    """Return the noise multiplier with which one release costs ε.

    Args:
        e: ε at δ = 1e-5.
    """
    # one step (z, q, count) with all samples: q = 1
    return float(find_noise(lambda z: [(z, 1.0, 1)], e, DELTA))


def priced(z: float) -> float:
    """Return ε of one release, at δ = 1e-5.

    Args:
        z: the noise multiplier.
    """
    return float(epsilon([(z, 1.0, 1)], DELTA).epsilon)


def noisy_matrices(
    features: Sequence[torch.Tensor], noise: GramNoise, streams: ClientNoise
) -> list[torch.Tensor]:
    """Return the clients' noisy Gram matrices, (D, D) each.

    Args:
        features: clients' features, (n_i, D) each.
        noise: the mechanism, which clips features and adds noise.
        streams: of the clients' noise.
    """
    matrices = []
    for i, x in enumerate(features):
        context = outside_run(streams, [i])
        matrices.append(noise.matrix(x, context))
    return matrices


def noisy(features: Sequence[torch.Tensor], noise: GramNoise, streams: ClientNoise) -> Array:
    """Return R (m, m) from clients' noisy Gram matrices.

    Args:
        features: clients' features, (n_i, D) each.
        noise: the mechanism, which clips features and adds noise.
        streams: of the clients' noise.
    """
    matrices = noisy_matrices(features, noise, streams)
    spectra = [noise.spectrum(matrix, VECTORS) for matrix in matrices]
    vectors = torch.stack([basis for _, basis in spectra])
    flat = vectors.flatten(0, 1)
    # pairs that compare fewer vectors would look more similar whatever their data
    shared = told_by_all(vectors)
    rows = []
    for matrix, (values, _) in zip(matrices, spectra, strict=True):
        # from the same noisy matrix, so that it is post-processing
        norms = (flat @ matrix).norm(dim=1)
        image = norms.view(len(matrices), -1)
        # a small turn of the first noisy vector would change eq. 3's ratios of all later ones
        row = span_relevance(values, image, shared=shared)
        rows.append(row.numpy())
    return symmetric(np.stack(rows))


def naive(features: Sequence[torch.Tensor], noise: GramNoise, streams: ClientNoise) -> Array:
    """Return R (m, m) from exact Gram matrices and noisy eigenvectors.

    Args:
        features: clients' features, (n_i, D) each.
        noise: the mechanism, which adds noise to eigenvectors.
        streams: of the clients' noise.
    """
    spectra = [top(x, VECTORS) for x in features]
    bases = []
    for i, (_, basis) in enumerate(spectra):
        context = outside_run(streams, [i])
        bases.append(noise.blurred(basis, context))
    return _relevance_to(torch.stack(bases), features, spectra)


def exact(features: Sequence[torch.Tensor]) -> Array:
    """Return R (m, m) without noise.

    Args:
        features: clients' features, (n_i, D) each.
    """
    spectra = [top(x, VECTORS) for x in features]
    vectors = torch.stack([basis for _, basis in spectra])
    # eigenvectors beyond a client's rank are zero, and are not compared
    return _relevance_to(vectors, features, spectra, vectors.any(-1))


def _relevance_to(
    vectors: torch.Tensor,
    features: Sequence[torch.Tensor],
    spectra: Sequence[tuple[torch.Tensor, torch.Tensor]],
    shared: torch.Tensor | None = None,
) -> Array:
    """Return R (m, m) of exact Gram matrices and the eigenvectors that clients sent.

    Args:
        vectors: the sent eigenvectors, (m, p, D).
        features: clients' features, (n_i, D) each.
        spectra: their own eigenvalues, (p,), and eigenvectors, (p, D).
        shared: the vectors that are compared, (m, p); all of them by default.
    """
    flat = vectors.flatten(0, 1)
    rows = []
    for x, (values, _) in zip(features, spectra, strict=True):
        image = projected(x, flat).view(len(features), -1)
        row = relevance(values, image, shared=shared)
        rows.append(row.numpy())
    return symmetric(np.stack(rows))


def symmetric(r: Array) -> Array:
    """Return (r + rᵀ)/2 with ones on the diagonal.

    Args:
        r: relevance, (m, m), by row of the client that computes it.
    """
    # eq. 5; Table I has ones on the diagonal
    out = (r + r.T) / 2
    np.fill_diagonal(out, 1)
    return np.asarray(out, dtype=np.float64)


def scored(
    r: Array, truth: Sequence[int], clusterer: str = "paper", noised: bool = True
) -> tuple[float, float]:
    """Return the ARI with T given, and without.

    Args:
        r: R, (m, m).
        truth: the clients' tasks, (m,).
        clusterer: a name of `CLUSTERERS`.
        noised: R was computed from noisy Gram matrices.
    """
    matrix = torch.from_numpy(r)
    scores = []
    for count in (len(set(truth)), None):
        labels = agglomerate(matrix, count, None, clusterer, noisy=noised).labels
        scores.append(float(agreement(labels, truth)["ari"]))
    with_count, without = scores
    return with_count, without


def draw(rows: Sequence[Row]) -> Any:
    """Draw mean ARI over ε with its range over seeds, dotted where all eigenvectors count.

    There is a panel for each data set and number of samples.
    """
    picture, axes = figure(11, 6.4, rows=2, columns=3)
    for line, (data, sizes) in zip(axes, SAMPLES.items(), strict=True):
        for axis, n in zip(line, sizes, strict=True):
            _panel(axis, rows, data, n)
    return picture


def _panel(axis: Any, rows: Sequence[Row], data: str, n: int) -> None:
    """Draw the features of one data set with n samples a client."""
    # ∞ stands one step beyond the largest
    finite = EPSILONS[:-1]
    x = [*finite, 2 * finite[-1]]
    for k, features in enumerate(FEATURES[data]):
        colour = f"C{k}"
        gram = _statistics(rows, data, n, features, "gram")
        if gram is not None:
            mean, minimum, maximum = gram
            axis.plot(x, mean, "-", color=colour, label=NAMES[features])
            axis.fill_between(x, minimum, maximum, color=colour, alpha=0.15, linewidth=0)
        every_vector = _statistics(rows, data, n, features, "all")
        if every_vector is not None:
            mean, *_ = every_vector
            axis.plot(x, mean, ":", color=colour)
    axis.plot([], [], ":", color="grey", label="every eigenvector counts")
    axis.set(
        xscale="log",
        title=f"{data}, {n} samples",
        xlabel="ε of one sample",
        ylabel="ARI",
        ylim=(-0.15, 1.05),
    )
    labels = [f"{e:g}" for e in finite]
    axis.set_xticks(x, [*labels, "∞"])
    axis.minorticks_off()
    axis.legend(fontsize=8, loc="lower right")


def _statistics(
    rows: Sequence[Row], data: str, n: int, features: str, mechanism: str
) -> Array | None:
    """Return mean, minimum and maximum of ARI by ε, (3, ε), or None where one is missing.

    Args:
        rows: the rows.
        data: the data set.
        n: samples of a client.
        features: the feature map.
        mechanism: "gram" or "all".
    """
    setting = ["tasks", data, str(n), features, mechanism]
    selected = [row for row in rows if [row[key] for key in KEYS] == setting]
    statistics = []
    for e in EPSILONS:
        by_setting = spread(selected, KEYS, f"ari_{e:g}")
        if not by_setting:
            return None
        (summary,) = by_setting.values()
        statistics.append(summary[:3])
    return np.array(statistics).T


KEYS = ("scenario", "data", "samples", "features", "mechanism")
NAMES = {"identity": "pixels", "dct": "16 lowest frequencies", "pca": "16 components of MNIST"}


def report(rows: Sequence[Row]) -> None:
    """Print means over seeds, of runs and of naive noise apart.

    Args:
        rows: of the sheet.
    """
    of_runs = [row for row in rows if row["mechanism"] != "naive"]
    for value in ("ari", "found", "spectral", "kmeans"):
        columns = [f"{value}_{e:g}" for e in EPSILONS]
        summarise(of_runs, KEYS, columns)
    of_naive = [row for row in rows if row["mechanism"] == "naive"]
    for s in DEVIATIONS:
        columns = [f"s_{s:g}", f"alone_{s:g}"]
        summarise(of_naive, KEYS, columns)


GRID = Grid(
    __doc__,
    "oneshot_noise",
    cells,
    measure,
    seeds=5,
    minutes=30.0,
    full="last",
    report=report,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
