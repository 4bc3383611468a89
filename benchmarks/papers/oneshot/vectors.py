"""Measure one-shot clusters from noisy Gram matrices over ε and the number of eigenvectors.

python -m benchmarks.papers.oneshot.vectors [--seeds 4] [--minutes 30]

Rotations: 21 clients in four clusters of 3, 6, 6 and 6, whose images are turned by 0, 90, 180 and
270 degrees. Tasks: ten clients in three tasks, 10 % of the samples of other tasks. The unit of
privacy is one sample, blanked; δ = 1e-5; each client releases its Gram matrix once.

The ARI is of the same noisy matrices: p = 1, 2, 5 or 10 eigenvectors are shared. `alone` compares
each eigenvector on its own, as eq. 3 and 4 do without noise; `span` is what runs with noise do
(`eigenvectors.span_relevance`), both with T given; `found` is `span` without T. The constants were
chosen on seeds 0 to 2, so seeds are from 10 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.grid import Grid, with_seeds
from benchmarks.papers.oneshot.noise import multiplier, noisy_matrices, scored, symmetric
from benchmarks.sheet import Cell, Row, figure, spread, summarise
from securecluster import Federation
from securecluster.clustering.eigenvectors import relevance, span_relevance
from securecluster.core.randomness import Randomness
from securecluster.data.scenarios import Iid, Tasks
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.common.comparison.gram_mechanism import GramNoise, told_by_all
from securecluster.protocols.oneshot.feature_maps import Features, build

FIRST = 10  # seed; constants were chosen on 0 to 2
DEALT = 1000  # samples of a client, of which a cell uses the first ones
COMPONENTS = 16
SIZES = (3, 6, 6, 6)  # clients of each rotation
VECTORS = (1, 2, 5, 10)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
PUBLIC = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}  # for pca
KEYS = ("scenario", "data", "samples", "features")
SETTINGS = (
    ("rotation", "mnist", 100, "dct"),
    ("rotation", "mnist", 300, "dct"),
    ("rotation", "mnist", 300, "pca"),
    ("rotation", "mnist", 300, "identity"),
    ("rotation", "fashion_mnist", 100, "dct"),
    ("rotation", "fashion_mnist", 300, "dct"),
    ("rotation", "fashion_mnist", 300, "pca"),
    ("tasks", "fashion_mnist", 300, "dct"),
    ("tasks", "fashion_mnist", 1000, "pca"),
)


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return settings by seed."""
    settings: list[Cell] = []
    for values in SETTINGS:
        setting = dict(zip(KEYS, values, strict=True))
        settings.append({**setting, "scale": scale})
    return with_seeds(settings, range(FIRST, FIRST + seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Return the ARI for each p and ε.

    Args:
        cell: its scenario, data set, samples, features and seed.
    """
    inputs, truth, phi = dealt(cell)
    # turned images are views with negative strides, which torch does not read
    contiguous = [np.ascontiguousarray(x) for x in inputs]
    features = [phi(torch.from_numpy(x)) for x in contiguous]
    randomness = Randomness(cell["seed"])
    maximum = max(VECTORS)
    results: dict[str, Any] = {}
    for e in EPSILONS:
        draws = NoiseStreams.derived(randomness, "oneshot_vectors")
        noise = GramNoise(multiplier(e), "gram", False)
        streams = ClientNoise("example", 0.0, 0.0, 0.0, draws)
        # one release for all p, so that ARIs differ by the comparison alone
        matrices = noisy_matrices(features, noise, streams)
        spectra = [noise.spectrum(matrix, maximum) for matrix in matrices]
        for p in VECTORS:
            largest = [(values[:p], basis[:p]) for values, basis in spectra]
            alone, span = compared(matrices, largest)
            alone_ari, _ = scored(alone, truth)
            with_count, without = scored(span, truth)
            results[f"alone_{p}_{e:g}"] = alone_ari
            results[f"span_{p}_{e:g}"] = with_count
            results[f"found_{p}_{e:g}"] = without
    return results


def dealt(cell: Cell) -> tuple[list[NDArray[np.float32]], list[int], Features]:
    """Return clients' samples, their true clusters, and the feature map.

    Args:
        cell: its scenario, data set, samples, features and seed.
    """
    data = cell["data"]
    seed = cell["seed"]
    n = cell["samples"]
    if cell["scenario"] == "tasks":
        federation = Federation.simulate(
            data, scenario=Tasks(minority=0.1), clients=10, samples=n, seed=seed
        )
        inputs = [shard.x for shard in federation.shards]
        truth = list(federation.truth or ())
    else:
        federation = Federation.simulate(
            data, scenario=Iid(overlap=False), clients=sum(SIZES), samples=DEALT, seed=seed
        )
        rotations = np.arange(len(SIZES))
        truth = np.repeat(rotations, SIZES).tolist()
        inputs = []
        for shard, turns in zip(federation.shards, truth, strict=True):
            # in the plane of an image's two axes, which are behind that of its channels
            rotated = np.rot90(shard.x[:n], turns, axes=(-2, -1))
            inputs.append(rotated)
    public = None
    if cell["features"] == "pca":
        public = PUBLIC[data]
    dimension = None
    if cell["features"] != "identity":
        dimension = COMPONENTS
    phi = build(cell["features"], federation.shape, Randomness(seed), public, dimension)
    return inputs, truth, phi


def compared(
    matrices: Sequence[torch.Tensor], spectra: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return R (m, m) of eigenvectors one at a time, and R of their spans.

    Args:
        matrices: the clients' Gram matrices, (D, D) each.
        spectra: their eigenvalues, (p,), and eigenvectors, (p, D).
    """
    vectors = torch.stack([basis for _, basis in spectra])
    flat = vectors.flatten(0, 1)
    shared = told_by_all(vectors)
    alone = []
    span = []
    for matrix, (values, _) in zip(matrices, spectra, strict=True):
        # eq. 2, of the noisy matrix
        norms = (flat @ matrix).norm(dim=1)
        image = norms.view(vectors.shape[:2])
        # eq. 3 and 4: vectors are matched by index
        by_vector = relevance(values, image, shared=shared)
        by_span = span_relevance(values, image, shared=shared)
        alone.append(by_vector.numpy())
        span.append(by_span.numpy())
    return symmetric(np.stack(alone)), symmetric(np.stack(span))


def draw(rows: Sequence[Row]) -> Any:
    """Draw a panel for each setting: mean ARI over ε by p, dotted where vectors count alone."""
    picture, axes = figure(11, 9, rows=3, columns=3)
    for axis, setting in zip(axes.flat, SETTINGS, strict=True):
        texts = [str(value) for value in setting]
        selected = [row for row in rows if [row[key] for key in KEYS] == texts]
        for k, p in enumerate(VECTORS):
            colour = f"C{k}"
            _curve(axis, selected, f"span_{p}", "-", colour, f"p = {p}")
            _curve(axis, selected, f"alone_{p}", ":", colour, None)
        axis.set(xscale="log", title=", ".join(texts), xlabel="ε of one sample", ylabel="ARI")
        axis.set(ylim=(-0.05, 1.05))
        labels = [f"{e:g}" for e in EPSILONS]
        axis.set_xticks(EPSILONS, labels)
        axis.minorticks_off()
        axis.plot([], [], ":", color="grey", label="each vector alone")
        axis.legend(fontsize=7, loc="lower right")
    return picture


def _curve(
    axis: Any, rows: Sequence[Row], value: str, style: str, colour: str, label: str | None
) -> None:
    """Draw the mean of a value over ε, where every ε was measured.

    Args:
        axis: the panel.
        rows: the rows of one setting.
        value: the beginning of the columns' names.
        style: the line's style.
        colour: the line's colour.
        label: the legend's text, if any.
    """
    means = []
    for e in EPSILONS:
        statistics = spread(rows, KEYS, f"{value}_{e:g}")
        means += [mean for mean, *_ in statistics.values()]
    if len(means) == len(EPSILONS):
        axis.plot(EPSILONS, means, style, color=colour, label=label)


def report(rows: Sequence[Row]) -> None:
    """Print means over seeds, by value and number of vectors.

    Args:
        rows: of the sheet.
    """
    for value in ("alone", "span", "found"):
        for p in VECTORS:
            columns = [f"{value}_{p}_{e:g}" for e in EPSILONS]
            summarise(rows, KEYS, columns)


GRID = Grid(
    __doc__, "oneshot_vectors", cells, measure, seeds=4, minutes=30.0, report=report, draw=draw
)

if __name__ == "__main__":
    print(GRID.main())
