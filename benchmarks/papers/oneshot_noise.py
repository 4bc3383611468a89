"""One-shot clusters from noisy Gram matrices over ε, which Ali & Arafa 2024 leave open: digits (two
tasks) and Fashion-MNIST (three).

python -m securecluster.benchmarks.papers.oneshot_noise [--seeds 5] [--full] [--minutes 30]

Ten clients (`--full` 100) of 100, 300 and 1000 samples, 10 % of them of other tasks; of the digits
700, which is about what their tasks have, and clients share samples from 300 on. p = 5; the unit of
privacy is one sample, added or removed; δ = 1e-5 (at ε = ∞ neither clip nor noise); one release of
each client's Gram matrix, which is all that it releases before training. Features: pixels; "dct",
the 16 lowest frequencies, which need no data; "pca", 16 components of public MNIST. Mechanisms:
"gram"; "all", the same with every eigenvector counted, whether or not it stands out of the noise;
"naive", noise of std s on the eigenvectors alone, whose ε (`alone`) is by their trivial sensitivity
2√p, while a run's is infinite, since relevance stays exact. ARI with T given, and (`found`)
without, where clients of one distribution (iid) should be one cluster; and with T given where
`spectral` clustering or `kmeans` part R. Seeds are from 20 on: no constant was chosen on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    options,
    spread,
    summarise,
)
from securecluster.clustering.eigenvectors import projected, relevance, span_relevance, top
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noise_robust import CLUSTERERS
from securecluster.core.randomness import Randomness
from securecluster.data.scenarios import Iid, Tasks
from securecluster.privacy.dp.accounting import epsilon, find_noise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.oneshot.feature_maps import build
from securecluster.protocols.oneshot.gram_mechanism import GramNoise, told_by_all
from securecluster.protocols.oneshot.server import agglomerate

Array = NDArray[np.float64]
DELTA, VECTORS, CLIENTS, FIRST = 1e-5, 5, 10, 20
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, float("inf"))
# of the naive mechanism, in each coordinate of a unit vector
DEVIATIONS = (
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
)
SAMPLES = {"digits": (100, 300, 700), "fashion_mnist": (100, 300, 1000)}
FEATURES = {"digits": ("identity", "dct"), "fashion_mnist": ("identity", "dct", "pca")}
PUBLIC, COMPONENTS, OVERLAP = "mnist", 16, 200


def cells(scale: str, seeds: int) -> list[Cell]:
    """Data by features by samples by mechanism by seed."""
    kinds = [
        {
            "data": data,
            "samples": n,
            "features": features,
            "mechanism": mechanism,
            "scenario": "tasks",
        }
        for data, options in FEATURES.items()
        for n in SAMPLES[data]
        for features in options
        for mechanism in ("gram", "all", "naive")
    ]
    kinds += [
        {"data": data, "samples": n, "features": "dct", "mechanism": "gram", "scenario": "iid"}
        for data, options in SAMPLES.items()
        for n in options
    ]
    fixed = {"scale": scale, "clients": CLIENTS if scale == "cpu" else 10 * CLIENTS}
    return [
        {**setting, **fixed, "seed": seed}
        for seed in range(FIRST, FIRST + seeds)
        for setting in kinds
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """ARI for each ε, or, of the naive mechanism, for each s, with the ε that its eigenvectors
    alone would have.
    """
    shared = cell["data"] == "digits" and cell["samples"] > OVERLAP
    scenario = (
        Tasks(minority=0.1, overlap=shared) if cell["scenario"] == "tasks" else Iid(overlap=shared)
    )
    federation = Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    public, dimension = (
        PUBLIC if cell["features"] == "pca" else None,
        None if cell["features"] == "identity" else COMPONENTS,
    )
    phi = build(cell["features"], federation.shape, Randomness(cell["seed"]), public, dimension)
    features, truth = (
        [phi(torch.from_numpy(shard.x)) for shard in federation.shards],
        federation.truth,
    )
    assert truth is not None
    made = GramNoise(
        1.0,
        "naive" if cell["mechanism"] == "naive" else "gram",
        False,
        NoiseStreams.derived(Randomness(cell["seed"]), "oneshot_noise"),
    )
    made = replace(made, separation=0.0) if cell["mechanism"] == "all" else made
    found: dict[str, Any] = {"dimension": phi.dimension}
    if made.naive:
        for s in DEVIATIONS:
            z = s / (2 * VECTORS**0.5)
            found |= {
                f"s_{s:g}": scored(naive(features, replace(made, multiplier=z)), truth)[0],
                f"alone_{s:g}": priced(z),
            }
        return found
    for e in EPSILONS:
        noise = None if np.isinf(e) else replace(made, multiplier=multiplier(e))
        r = exact(features) if noise is None else noisy(features, noise)
        found[f"ari_{e:g}"], found[f"found_{e:g}"] = scored(r, truth, noised=noise is not None)
        found |= {f"{name}_{e:g}": scored(r, truth, name)[0] for name in CLUSTERERS[2:]}
    return found


def multiplier(e: float) -> float:
    """The noise multiplier with which one release costs ε."""
    return float(find_noise(lambda z: [(z, 1.0, 1)], e, DELTA))


def priced(z: float) -> float:
    """ε of one release."""
    return float(epsilon([(z, 1.0, 1)], DELTA).epsilon)


def noisy(features: Sequence[torch.Tensor], noise: GramNoise) -> Array:
    """R (m, m) from clients' noisy Gram matrices."""
    made = [noise.matrix(x, i) for i, x in enumerate(features)]
    spectra = [noise.spectrum(a, VECTORS) for a in made]
    vectors = torch.stack([own for _, own in spectra])
    images = [(vectors.flatten(0, 1) @ a).norm(dim=1).view(len(made), -1) for a in made]
    shared = told_by_all(vectors)
    rows = [
        span_relevance(values, image, shared=shared).numpy()
        for (values, _), image in zip(spectra, images, strict=True)
    ]
    return symmetric(np.stack(rows))


def naive(features: Sequence[torch.Tensor], noise: GramNoise) -> Array:
    """R (m, m) from exact Gram matrices and noisy eigenvectors."""
    spectra = [top(x, VECTORS) for x in features]
    vectors = torch.stack([noise.blurred(own, i) for i, (_, own) in enumerate(spectra)])
    images = [projected(x, vectors.flatten(0, 1)).view(len(features), -1) for x in features]
    return symmetric(
        np.stack(
            [
                relevance(values, image).numpy()
                for (values, _), image in zip(spectra, images, strict=True)
            ]
        )
    )


def exact(features: Sequence[torch.Tensor]) -> Array:
    """R (m, m) without noise."""
    spectra = [top(x, VECTORS) for x in features]
    vectors = torch.stack([own for _, own in spectra])
    images = [projected(x, vectors.flatten(0, 1)).view(len(features), -1) for x in features]
    rows = [
        relevance(values, image, shared=vectors.any(-1)).numpy()
        for (values, _), image in zip(spectra, images, strict=True)
    ]
    return symmetric(np.stack(rows))


def symmetric(r: Array) -> Array:
    """(r + rᵀ)/2 with ones where a client meets itself."""
    out = (r + r.T) / 2
    np.fill_diagonal(out, 1)
    return np.asarray(out, dtype=np.float64)


def scored(
    r: Array, truth: Sequence[int], clusterer: str = "paper", noised: bool = True
) -> tuple[float, float]:
    """ARI with T given, and without."""
    one, two = (
        agglomerate(t, None, clusterer, noisy=noised)(torch.from_numpy(r)).labels
        for t in (len(set(truth)), None)
    )
    return float(agreement(one, truth)["ari"]), float(agreement(two, truth)["ari"])


def draw(rows: Sequence[Row]) -> Any:
    """A panel for each data set and number of samples: mean ARI over ε, with its range over seeds;
    dotted where all eigenvectors count.
    """
    made, axes = figure(11, 6.4, rows=2, columns=3)
    over = [*EPSILONS[:-1], 2 * EPSILONS[-2]]  # ∞ stands one step beyond the largest
    for line, (data, sizes) in zip(axes, SAMPLES.items(), strict=True):
        for place, n in zip(line, sizes, strict=True):
            for k, features in enumerate(FEATURES[data]):
                for mechanism, style in (("gram", "-"), ("all", ":")):
                    own = [
                        row
                        for row in rows
                        if [row[key] for key in KEYS]
                        == ["tasks", data, str(n), features, mechanism]
                    ]
                    found = [spread(own, KEYS, f"ari_{e:g}") for e in EPSILONS]
                    known = [next(iter(value.values()))[:3] for value in found if value]
                    if len(known) == len(over):
                        mean, least, most = np.array(known).T
                        place.plot(
                            over,
                            mean,
                            style,
                            color=f"C{k}",
                            label=NAMES[features] if mechanism == "gram" else None,
                        )
                        if mechanism == "gram":
                            place.fill_between(
                                over, least, most, color=f"C{k}", alpha=0.15, linewidth=0
                            )
            place.plot([], [], ":", color="grey", label="every eigenvector counts")
            place.set(
                xscale="log",
                title=f"{data}, {n} samples",
                xlabel="ε of one sample",
                ylabel="ARI",
                ylim=(-0.15, 1.05),
            )
            place.set_xticks(over, [f"{e:g}" for e in EPSILONS[:-1]] + ["∞"])
            place.minorticks_off()
            place.legend(fontsize=8, loc="lower right")
    return made


KEYS = ("scenario", "data", "samples", "features", "mechanism")
NAMES = {"identity": "pixels", "dct": "16 lowest frequencies", "pca": "16 components of MNIST"}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=5, minutes=30.0)
    sheet = Sheet("oneshot_noise")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    for what in ("ari", "found", "spectral", "kmeans"):
        summarise(
            [row for row in rows if row["mechanism"] != "naive"],
            KEYS,
            [f"{what}_{e:g}" for e in EPSILONS],
        )
    summarise(
        [row for row in rows if row["mechanism"] == "naive"],
        KEYS,
        [f"{what}_{s:g}" for s in DEVIATIONS for what in ("s", "alone")],
    )
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
