"""One-shot clusters from noisy Gram matrices over ε, for p = 1, 2, 5 and 10 shared eigenvectors.

python -m securecluster.benchmarks.papers.oneshot_vectors [--seeds 4] [--minutes 30]

Rotations: 21 clients in four clusters of 3, 6, 6 and 6, whose images are turned by 0, 90, 180 and
270 degrees. Tasks: ten clients in three tasks, 10 % of the samples of other tasks. The unit of
privacy is one sample, added or removed; δ = 1e-5; each client releases its Gram matrix once. ARI of
the same noisy matrices: `alone` compares each eigenvector on its own, as eq. 3 and 4 do without
noise; `span` is what runs with noise do (`spectra.span_relevance`), both with T given; `found` is
`span` without T. The constants were chosen on seeds 0 to 2, so seeds are from 10 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.benchmarks.papers.oneshot_noise import multiplier, scored, symmetric
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    options,
    spread,
    summarise,
)
from securecluster.clustering.eigenvectors import relevance, span_relevance
from securecluster.core.randomness import Randomness
from securecluster.data.scenarios import Iid, Tasks
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.oneshot.feature_maps import Features, build
from securecluster.protocols.oneshot.gram_mechanism import GramNoise, told_by_all

FIRST, DEALT, COMPONENTS = 10, 1000, 16
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
    kinds = [dict(zip(KEYS, setting, strict=True)) for setting in SETTINGS]
    found: list[Cell] = []
    for seed in range(FIRST, FIRST + seeds):
        found += [{**kind, "scale": scale, "seed": seed} for kind in kinds]
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """Return the ARI for each p and ε."""
    inputs, truth, phi = dealt(cell)
    features = [phi(torch.from_numpy(np.ascontiguousarray(x))) for x in inputs]
    found: dict[str, Any] = {}
    for e in EPSILONS:
        draws = NoiseStreams.derived(Randomness(cell["seed"]), "oneshot_vectors")
        noise = GramNoise(multiplier(e), "gram", False, draws)
        matrices = [noise.matrix(x, i) for i, x in enumerate(features)]
        spectra = [noise.spectrum(a, max(VECTORS)) for a in matrices]
        for p in VECTORS:
            alone, span = compared(matrices, [(values[:p], own[:p]) for values, own in spectra])
            found[f"alone_{p}_{e:g}"] = scored(alone, truth)[0]
            found[f"span_{p}_{e:g}"], found[f"found_{p}_{e:g}"] = scored(span, truth)
    return found


def dealt(cell: Cell) -> tuple[list[NDArray[np.float32]], list[int], Features]:
    """Return clients' samples, their true clusters, and the feature map."""
    data, seed, n = cell["data"], cell["seed"], cell["samples"]
    if cell["scenario"] == "tasks":
        scenario = Tasks(minority=0.1)
        federation = Federation.simulate(data, scenario=scenario, clients=10, samples=n, seed=seed)
        inputs = [shard.x for shard in federation.shards]
        truth = list(federation.truth or ())
    else:
        clients = sum(SIZES)
        federation = Federation.simulate(
            data,
            scenario=Iid(overlap=False),
            clients=clients,
            samples=DEALT,
            seed=seed,
        )
        truth = np.repeat(np.arange(len(SIZES)), SIZES).tolist()
        pairs = zip(federation.shards, truth, strict=True)
        inputs = [np.rot90(shard.x[:n], turns, axes=(-2, -1)) for shard, turns in pairs]
    public = PUBLIC[data] if cell["features"] == "pca" else None
    dimension = None if cell["features"] == "identity" else COMPONENTS
    phi = build(cell["features"], federation.shape, Randomness(seed), public, dimension)
    return inputs, truth, phi


def compared(
    matrices: Sequence[torch.Tensor],
    spectra: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return R (m, m) of eigenvectors one at a time, and R of their spans."""
    vectors = torch.stack([own for _, own in spectra])
    shared = told_by_all(vectors)
    alone, span = [], []
    for matrix, (values, _) in zip(matrices, spectra, strict=True):
        image = (vectors.flatten(0, 1) @ matrix).norm(dim=1).view(vectors.shape[:2])
        alone.append(relevance(values, image, shared=shared).numpy())
        span.append(span_relevance(values, image, shared=shared).numpy())
    return symmetric(np.stack(alone)), symmetric(np.stack(span))


def draw(rows: Sequence[Row]) -> Any:
    """Draw a panel for each setting: mean ARI over ε by p, dotted where vectors count alone."""
    made, axes = figure(11, 9, rows=3, columns=3)
    for place, setting in zip(axes.flat, SETTINGS, strict=True):
        own = [row for row in rows if tuple(row[key] for key in KEYS) == tuple(map(str, setting))]
        for k, p in enumerate(VECTORS):
            for what, style in (("span", "-"), ("alone", ":")):
                found = [spread(own, KEYS, f"{what}_{p}_{e:g}") for e in EPSILONS]
                means = [next(iter(value.values()))[0] for value in found if value]
                if len(means) == len(EPSILONS):
                    label = f"p = {p}" if what == "span" else None
                    place.plot(EPSILONS, means, style, color=f"C{k}", label=label)
        scenario, data, n, features = setting
        title = f"{scenario}, {data}, {n}, {features}"
        place.set(xscale="log", title=title, xlabel="ε of one sample", ylabel="ARI")
        place.set(ylim=(-0.05, 1.05))
        place.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        place.minorticks_off()
        place.plot([], [], ":", color="grey", label="each vector alone")
        place.legend(fontsize=7, loc="lower right")
    return made


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=4, minutes=30.0)
    sheet = Sheet("oneshot_vectors")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    for what in ("alone", "span", "found"):
        for p in VECTORS:
            summarise(rows, KEYS, [f"{what}_{p}_{e:g}" for e in EPSILONS])
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
