"""How much noise clusters bear, from whole updates and from sketches of them, and what compression
leaves: CFL and FL+HC on digits.

python -m securecluster.benchmarks.papers.sketches [--seeds 3] [--minutes 10]

20 clients in 4 clusters of swapped labels. "updates": those of one plain run (FL+HC: of the
clustering round; CFL: of round 20 of one that never splits) go through the stages of a run, sketch
→ clip → noise → quantise, and are clustered again, three times with fresh draws; S is their median
norm, so that half of the clients are clipped. FL+HC cuts by its own rules (paper: ward and the
largest gap; other clusterers: the gap of eigenvalues). CFL splits these updates, and the halves
again, by its relative split test. "run": whole runs of 25 rounds, S = 1, in which averages have the
same noise as compressed updates. Seeds are from 20 on: no constant was chosen on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster import Federation, LabelSwap
from securecluster.benchmarks.papers.cfl_runs import NEVER
from securecluster.benchmarks.papers.sheet import Cell, Row, Sheet, figure, options, spread
from securecluster.clustering.agglomerative import cut, gap_of, merges
from securecluster.clustering.distances import alike, distances
from securecluster.clustering.labels import members
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noise_robust import (
    CLUSTERERS,
    default_threshold,
    evidence_for_split,
    partition,
    split_into_two,
)
from securecluster.clustering.similarity import FLOOR, cosine, gram, gram_norms
from securecluster.core.randomness import Randomness
from securecluster.privacy.compression import codecs
from securecluster.privacy.compression.sketches import Sketch
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols import CFL, FLHC, Settings
from securecluster.protocols.cfl.separation import largest_noise

METHODS: dict[str, type[Any]] = {"cfl": CFL, "flhc": FLHC}
SIGMAS = (0.0, 0.01, 0.03, 0.06, 0.09, 0.125, 0.18, 0.25, 0.5, 1.0)  # σ/S
SKETCHES = (0, 64, 256)  # 0: whole updates
CODES = ("none", "8bit", "4bit", "1bit", "topk:0.01", "topk:0.1")
FIRST, DRAWS, ROUNDS, RECORDED, LEAST = 20, 3, 25, 20, 0.9
CLIENTS, CLUSTERS = 20, 4
RUNS: tuple[dict[str, Any], ...] = (
    *(
        {"sketch": q, "clusterer": c, "noise": z}
        for q in (None, 64)
        for c in ("paper", "average")
        for z in (0.0, 0.03, 0.06, 0.125)
    ),
    *({"compress": code} for code in CODES[1:]),
)


def cells(scale: str, seeds: int) -> list[Cell]:
    """Sketches, and compressions, of recorded updates; then whole runs."""
    found: list[Cell] = []
    for seed in range(FIRST, FIRST + seeds):
        for name in METHODS:
            base = {
                "scale": scale,
                "data": "digits",
                "clients": CLIENTS,
                "clusters": CLUSTERS,
                "seed": seed,
                "method": name,
            }
            found += [
                {**base, "of": "updates", "sketch": q or None, "compress": "none"} for q in SKETCHES
            ]
            found += [
                {**base, "of": "updates", "sketch": None, "compress": code} for code in CODES[1:]
            ]
            found += [
                {
                    **base,
                    "of": "run",
                    "sketch": None,
                    "compress": "none",
                    "clusterer": "paper",
                    "noise": 0.0,
                    **run,
                }
                for run in RUNS
            ]
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """ARI by clusterer and noise, or a run's ARI, accuracy, ε and bytes."""
    return _run(cell) if cell["of"] == "run" else _updates(cell)


def _run(cell: Cell) -> dict[str, Any]:
    noise = {"clip": 1.0, "noise": cell["noise"]} if cell["noise"] else {}
    params = {name: cell[name] for name in ("sketch", "compress", "clusterer")}
    fitted = METHODS[cell["method"]](rounds=ROUNDS, **params, **noise).fit(
        _federation(cell["seed"]), Settings(transcript="sizes")
    )
    told = next(
        e for e in fitted.transcript_.entries if e.method in ("train", "send_compressed_update")
    )
    return {
        "ari": fitted.agreement_["ari"],
        "accuracy": float(np.mean(fitted.accuracy_)),
        "epsilon": fitted.ledger_.epsilon,
        "bytes": max(told.up),
        "up": fitted.bytes_["up"],
    }


def _updates(cell: Cell) -> dict[str, Any]:
    rows, first = _recorded(cell["method"], cell["seed"])
    bound, truth = float(rows.norm(dim=1).median()), _federation(cell["seed"]).truth
    assert truth is not None
    found: dict[str, Any] = {}
    for sigma in SIGMAS if cell["compress"] == "none" else SIGMAS[:1]:
        scores: dict[str, list[float]] = {name: [] for name in CLUSTERERS}
        for draw in range(DRAWS):
            short, pipeline = _brief(rows, cell, sigma, bound, draw)
            for name, own in scores.items():
                labels = (_cfl if cell["method"] == "cfl" else _flhc)(
                    short, pipeline.noise(rows.shape[1]), name, cell["sketch"], first
                )
                own.append(float(agreement(labels, truth)["ari"]))
        found |= {f"{name}_{sigma:g}": float(np.mean(own)) for name, own in scores.items()}
    return found


def _brief(
    rows: torch.Tensor, cell: Cell, sigma: float, bound: float, draw: int
) -> tuple[torch.Tensor, Pipeline]:
    """What the server reads of a round's updates, and the stages that made it."""
    public = Randomness(cell["seed"])
    noise = (Clip(bound), Noise(bound, sigma)) if sigma else ()
    sketch = (Sketch(cell["sketch"], public),) if cell["sketch"] else ()
    pipeline = Pipeline([*sketch, *noise, *codecs.build(cell["compress"], rows.shape[1])])
    pipeline.arm(NoiseStreams.derived(public, "sketches"))
    return pipeline.decode(
        pipeline.forward(rows.clone(), 1000 + draw, ids=range(len(rows)), field="compressed")
    ), pipeline


def _flhc(
    rows: torch.Tensor, noise: float, clusterer: str, sketch: int | None, first: float
) -> list[int]:
    """As FL+HC clusters, by its defaults."""
    if clusterer != "paper":
        return partition(alike(rows, "chord", noise).numpy(), clusterer)
    tree = merges(distances(rows, "chord", noise).numpy(), "ward")
    return cut(
        tree,
        default_threshold(
            tree, gap_of("chord", "ward"), alike(rows, "cosine", noise).numpy(), seed=0
        ),
    )


def _cfl(
    rows: torch.Tensor, noise: float, clusterer: str, sketch: int | None, first: float
) -> list[int]:
    """As CFL would split these updates and their halves, by the relative split test; `first` is max
    ‖Δ‖ of the first round.
    """
    plan, inner = CFL(), gram(rows, None, noise)
    norms, labels = gram_norms(inner), [0] * len(rows)
    longest = float(norms.square().mean().sqrt() if noise else norms.max())
    square, width = float(norms.quantile(0.5)) ** 2, rows.shape[1]
    clear = (noise**2 + 2 * noise * square) / width / max(square, 1e-12) ** 2 + (
        1 / width if sketch else 0.0
    )
    alpha: NDArray[np.float64] = cosine(inner, FLOOR if clear else 0.0).numpy()
    left = [0]
    while left:
        own = members(labels)[(cluster := left.pop())]
        if len(own) < plan.min_size:
            continue
        part = alpha[np.ix_(own, own)]
        found = split_into_two(part, clusterer)
        chance = evidence_for_split(part, clusterer, plan.evidence, plan.level, seed=0).p_value
        incongruent = longest > plan.eps2 * max(first, longest)
        if incongruent and chance <= plan.level and plan.gamma_max < largest_noise(found.cross_max):
            new = 1 + max(labels)
            for k in found.second:
                labels[own[k]] = new
            left += [cluster, new]
    return labels


@lru_cache
def _recorded(method: str, seed: int) -> tuple[torch.Tensor, float]:
    """The updates (m, d) that clusters are told from, and the largest norm of those of the first
    round.
    """
    params = {**NEVER, "rounds": RECORDED} if method == "cfl" else {"mask": "none"}
    fitted = METHODS[method](**params).fit(_federation(seed), Settings(transcript="full"))
    calls = [k for k, e in enumerate(fitted.transcript_.entries) if e.method == "train"]
    first, last = (fitted.transcript_.content(calls[n])[1].reply.delta.values for n in (0, -1))
    return last, float(first.norm(dim=1).max())


@lru_cache
def _federation(seed: int) -> Federation:
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=CLUSTERS), clients=CLIENTS, seed=seed
    )


def borne(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """By method, sketch and clusterer: the largest σ/S up to which the mean ARI over seeds is at
    least 0.9.
    """
    found: dict[tuple[str, str, str], float] = {}
    for name in CLUSTERERS:
        means: list[Mapping[tuple[str, ...], tuple[float, float, float, int]]]
        means = [spread(rows, ("method", "sketch"), f"{name}_{sigma:g}") for sigma in SIGMAS]
        for key in means[0]:
            good = [at[key][0] >= LEAST for at in means]
            found[(key[0], key[1], name)] = max(
                (s for n, s in enumerate(SIGMAS) if all(good[: n + 1])), default=float("nan")
            )
    return found


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure, print, draw."""
    given = options(__doc__, argv)
    sheet = Sheet("sketches")
    rows = [
        row
        for row in sheet.fill(cells(given.scale, given.seeds), measure, given.minutes)
        if row["status"] == "done"
    ]
    told = [row for row in rows if row["of"] == "updates" and row["compress"] == "none"]
    for (method, sketch, name), sigma in borne(told).items():
        print(
            f"{method}, {sketch or 'whole updates'}, {name}: ARI at least {LEAST} up to σ/S = "
            f"{sigma:g}"
        )
    for name in CLUSTERERS:
        for key, (mean, *_) in spread(
            [r for r in rows if r["of"] == "updates" and not r["sketch"]],
            ("method", "compress"),
            f"{name}_0",
        ).items():
            print(f"{', '.join(key)}, {name}: ARI {mean:.3f} without noise")
    keys = ("method", "sketch", "compress", "clusterer", "noise")
    for value in ("ari", "accuracy", "epsilon", "bytes", "up"):
        for key, (mean, least, most, count) in spread(
            [r for r in rows if r["of"] == "run"], keys, value
        ).items():
            print(f"run {', '.join(key)}: {value} {mean:.4g} ({least:.4g} – {most:.4g}; {count})")
    sheet.save(picture(told), given.scale)
    return sheet


def picture(rows: Sequence[Row]) -> Any:
    """ARI over σ/S: a panel a method, a colour a sketch, solid lines for the paper's clusterer,
    broken ones for average linkage.
    """
    made, axes = figure(9, 3.6, 1, len(METHODS))
    at = [max(s, SIGMAS[1] / 2) for s in SIGMAS]
    for axis, method in zip(axes[0], METHODS, strict=True):
        for colour, q in enumerate(SKETCHES):
            own = [
                r for r in rows if r["method"] == method and r["sketch"] == (str(q) if q else "")
            ]
            for clusterer, style in (("paper", "-"), ("average", "--")):
                means = [
                    spread(own, ("method",), f"{clusterer}_{s:g}").get((method,), (float("nan"),))[
                        0
                    ]
                    for s in SIGMAS
                ]
                axis.semilogx(
                    at,
                    means,
                    style,
                    color=f"C{colour}",
                    label=f"{q or 'whole update'}, {clusterer}",
                )
        axis.set(title=method, xlabel="σ/S (leftmost: 0)", ylabel="ARI", ylim=(-0.05, 1.05))
    axes[0][0].legend(fontsize=7)
    return made


if __name__ == "__main__":
    main()
