"""Measure how noise, sketches and compression affect the clusters of CFL and FL+HC on digits.

python -m benchmarks.papers.sketches [--seeds 3] [--minutes 10]

Clusters are computed from whole updates and from sketches of them. There are 20 clients in 4
clusters of swapped labels.

"updates": those of one plain run (FL+HC: of the clustering round; CFL: of round 20 of one that
never splits) go through the stages of a run, sketch → clip → noise → quantise, and are clustered
again, three times with fresh draws. S is their median norm, so that half of the clients are
clipped. FL+HC cuts by its own rules (paper: ward and the largest gap; other clusterers: the gap of
eigenvalues). CFL splits these updates, and the sides again, by its relative split test.

"run": whole runs of 25 rounds, S = 1, in which averages have the same noise as compressed updates.

Seeds are from 20 on, since no constant was chosen on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.grid import Grid
from benchmarks.papers.cfl.runs import NEVER
from benchmarks.sheet import DONE, Cell, Row, figure, shown_spread, spread
from securecluster import Federation, LabelSwap
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
FIRST = 20  # seed; constants were chosen on lower ones
DRAWS = 3  # of noise and sketches, over which the ARI is averaged
ROUNDS = 25  # of a whole run
RECORDED = 20  # the round of CFL's recorded updates
LEAST = 0.9  # mean ARI with which clusters count as found
CLIENTS = 20
CLUSTERS = 4
RUN = {"sketch": None, "compress": "none", "clusterer": "paper", "noise": 0.0}
RUN_SKETCHES = (None, 64)
RUN_CLUSTERERS = ("paper", "average")
RUN_NOISES = (0.0, 0.03, 0.06, 0.125)  # σ/S


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of sketches and of compressions of recorded updates, then of whole runs.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    settings: list[Cell] = []
    for seed, name in product(range(FIRST, FIRST + seeds), METHODS):
        base = {
            "scale": scale,
            "data": "digits",
            "clients": CLIENTS,
            "clusters": CLUSTERS,
            "seed": seed,
            "method": name,
        }
        updates = {**base, "of": "updates", "sketch": None, "compress": "none"}
        run = {**base, "of": "run", **RUN}
        for q in SKETCHES:
            settings.append({**updates, "sketch": q or None})
        for code in CODES[1:]:
            settings.append({**updates, "compress": code})
        for sketch, clusterer, noise in product(RUN_SKETCHES, RUN_CLUSTERERS, RUN_NOISES):
            varied = {"sketch": sketch, "clusterer": clusterer, "noise": noise}
            settings.append({**run, **varied})
        for code in CODES[1:]:
            settings.append({**run, "compress": code})
    return settings


def measure(cell: Cell) -> dict[str, Any]:
    """Return the ARI by clusterer and noise, or a run's ARI, accuracy, ε and bytes.

    Args:
        cell: recorded updates or a whole run, and the stages that they go through.
    """
    if cell["of"] == "run":
        return _run(cell)
    return _updates(cell)


def _run(cell: Cell) -> dict[str, Any]:
    """Return the results of a whole run."""
    params = {name: cell[name] for name in ("sketch", "compress", "clusterer")}
    if cell["noise"]:
        # S = 1, so that the noise σ is σ/S
        params |= {"clip": 1.0, "noise": cell["noise"]}
    protocol = METHODS[cell["method"]]
    method = protocol(rounds=ROUNDS, **params)
    federation = _federation(cell["seed"])
    fitted = method.fit(federation, Settings(transcript="sizes", keys_from_seed=True))
    # whole updates are replies of training; compressed ones have a method of their own
    uploads = ("train", "send_compressed_update")
    entries = fitted.transcript_.entries
    sizes = [entry.up for entry in entries if entry.method in uploads]
    return {
        "ari": fitted.agreement_["ari"],
        "accuracy": float(np.mean(fitted.accuracy_)),
        "epsilon": fitted.ledger_.epsilon,
        "bytes": max(sizes[0]),
        "up": fitted.bytes_["up"],
    }


def _updates(cell: Cell) -> dict[str, Any]:
    """Return the mean ARI of recorded updates by clusterer and noise."""
    seed = cell["seed"]
    rows, first = _recorded(cell["method"], seed)
    truth = _federation(seed).truth
    assert truth is not None
    # the median norm, so that half of the clients are clipped
    norms = rows.norm(dim=1)
    bound = float(norms.median())
    cluster = _flhc
    if cell["method"] == "cfl":
        cluster = _cfl
    sigmas: tuple[float, ...] = SIGMAS
    if cell["compress"] != "none":
        # compression is measured without noise
        sigmas = SIGMAS[:1]
    results: dict[str, Any] = {}
    for sigma in sigmas:
        scores: dict[str, list[float]] = {name: [] for name in CLUSTERERS}
        for draw in range(DRAWS):
            short, pipeline = _brief(rows, cell, sigma, bound, draw)
            for name, aris in scores.items():
                noise = pipeline.noise(rows.shape[1])
                labels = cluster(short, noise, name, cell["sketch"], first)
                ari = agreement(labels, truth)["ari"]
                aris.append(float(ari))
        for name, aris in scores.items():
            results[f"{name}_{sigma:g}"] = float(np.mean(aris))
    return results


def _brief(
    rows: torch.Tensor, cell: Cell, sigma: float, bound: float, draw: int
) -> tuple[torch.Tensor, Pipeline]:
    """Pass a round's updates through the stages of a run.

    Args:
        rows: the updates, (m, d).
        cell: its sketch, compression and seed shape the stages.
        sigma: the noise σ/S; at 0 nothing is clipped.
        bound: the clipping norm S.
        draw: the number of the fresh draw.

    Returns:
        The rows that the server reads, and the stages.
    """
    public = Randomness(cell["seed"])
    stages: list[Any] = []
    # sketches before noise: noise before the sketch is worse than no sketch
    if cell["sketch"]:
        stages.append(Sketch(cell["sketch"], public))
    if sigma:
        stages += [Clip(bound), Noise(bound, sigma)]
    stages += codecs.build(cell["compress"], rows.shape[1])
    pipeline = Pipeline(stages)
    pipeline.arm(NoiseStreams.derived(public, "sketches"))
    # a round number of its own for each draw, so that its noise is fresh
    number = 1000 + draw
    clients = range(len(rows))
    messages = pipeline.forward(rows.clone(), number, ids=clients, field="compressed")
    return pipeline.decode(messages), pipeline


def _flhc(
    rows: torch.Tensor, noise: float, clusterer: str, sketch: int | None, first: float
) -> list[int]:
    """Cluster as FL+HC does by its defaults.

    Args:
        rows: the updates that the server reads, (m, d).
        noise: the noise of the pipeline, at this width.
        clusterer: a name of `CLUSTERERS`.
        sketch: not used here; CFL has the same parameters.
        first: not used here.

    Returns:
        A label for each update.
    """
    if clusterer != "paper":
        similarities = alike(rows, "chord", noise).numpy()
        return partition(similarities, clusterer)
    tree = merges(distances(rows, "chord", noise).numpy(), "ward")
    gap = gap_of("chord", "ward")
    cosines = alike(rows, "cosine", noise).numpy()
    limit = default_threshold(tree, gap, cosines, "ward", seed=0)
    return cut(tree, limit)


def _cfl(
    rows: torch.Tensor, noise: float, clusterer: str, sketch: int | None, first: float
) -> list[int]:
    """Split as CFL would split these updates and their sides, by the relative split test.

    Args:
        rows: the updates that the server reads, (m, d).
        noise: the noise of the pipeline, at this width.
        clusterer: a name of `CLUSTERERS`.
        sketch: the width of the sketch, if any.
        first: max ‖Δ‖ of the first round.

    Returns:
        A label for each update.
    """
    plan = CFL()
    inner = gram(rows, None, noise)
    norms = gram_norms(inner)
    longest = float(norms.max())
    if noise:
        # the longest of noisy norms would be the one with the most noise
        mean_square = norms.square().mean()
        longest = float(mean_square.sqrt())
    alpha = _cosines(inner, norms, noise, rows.shape[1], sketch)
    # eq. 33 with ε2 as a share of the largest norm of any round (not in the paper)
    incongruent = longest > plan.eps2 * max(first, longest)
    labels = [0] * len(rows)
    pending = [0]
    while pending:
        cluster = pending.pop()
        positions = members(labels)[cluster]
        if len(positions) < plan.additions.min_size:
            continue
        block = alpha[np.ix_(positions, positions)]
        sides = split_into_two(block, clusterer)
        evidence = evidence_for_split(
            block, clusterer, plan.additions.evidence, plan.additions.level, seed=0
        )
        significant = evidence.p_value <= plan.additions.level
        # eq. 39 of the paper
        separable = plan.gamma_max < largest_noise(sides.cross_max)
        if incongruent and significant and separable:
            new = 1 + max(labels)
            for k in sides.second:
                labels[positions[k]] = new
            pending += [cluster, new]
    return labels


def _cosines(
    inner: torch.Tensor, norms: torch.Tensor, noise: float, width: int, sketch: int | None
) -> NDArray[np.float64]:
    """Return the cosines of updates, (m, m).

    Args:
        inner: their inner products, (m, m).
        norms: their norms, (m,).
        noise: the noise of the pipeline, at this width.
        width: the number of columns.
        sketch: the width of the sketch, if any.
    """
    square = float(norms.quantile(0.5)) ** 2
    # the variance of a cosine by noise, and by the sketch, whose error is about 1/√q
    of_products = (noise**2 + 2 * noise * square) / width
    variance = of_products / max(square, 1e-12) ** 2
    if sketch:
        variance += 1 / width
    floor = 0.0
    if variance:
        floor = FLOOR
    alpha: NDArray[np.float64] = cosine(inner, floor).numpy()
    return alpha


@lru_cache
def _recorded(method: str, seed: int) -> tuple[torch.Tensor, float]:
    """Return the updates (m, d) that clusters are computed from, and max ‖Δ‖ of the first round.

    Args:
        method: a name of `METHODS`.
        seed: the seed of the federation.
    """
    params: dict[str, Any] = {"mask": "none"}
    if method == "cfl":
        params = {**NEVER, "rounds": RECORDED}
    protocol = METHODS[method](**params)
    settings = Settings(transcript="full", keys_from_seed=True)
    fitted = protocol.fit(_federation(seed), settings)
    transcript = fitted.transcript_
    methods = [entry.method for entry in transcript.entries]
    calls = [k for k, name in enumerate(methods) if name == "train"]
    _, first = transcript.content(calls[0])
    _, last = transcript.content(calls[-1])
    first_norms = first.reply.delta.values.norm(dim=1)
    return last.reply.delta.values, float(first_norms.max())


@lru_cache
def _federation(seed: int) -> Federation:
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=CLUSTERS), clients=CLIENTS, seed=seed
    )


def borne(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Return the largest σ/S up to which the mean ARI over seeds is at least 0.9.

    Args:
        rows: the rows of uncompressed updates.

    Returns:
        σ/S by method, sketch and clusterer; NaN where no noise leaves such an ARI.
    """
    largest: dict[tuple[str, str, str], float] = {}
    for name in CLUSTERERS:
        by_sigma = {}
        for sigma in SIGMAS:
            by_sigma[sigma] = spread(rows, ("method", "sketch"), f"{name}_{sigma:g}")
        for method, sketch in by_sigma[SIGMAS[0]]:
            limit = float("nan")
            for sigma, means in by_sigma.items():
                mean, *_ = means[method, sketch]
                if not mean >= LEAST:
                    break
                limit = sigma
            largest[method, sketch, name] = limit
    return largest


def _print_updates(updates: Sequence[Row], uncompressed: Sequence[Row]) -> None:
    """Print the noise up to which clusters of updates are found, and their ARI by compression.

    Args:
        updates: the rows of recorded updates.
        uncompressed: those of them without compression.
    """
    for (method, sketch, name), sigma in borne(uncompressed).items():
        width = sketch or "whole updates"
        setting = f"{method}, {width}, {name}"
        print(f"{setting}: ARI at least {LEAST} up to σ/S = {sigma:g}")
    unsketched = [row for row in updates if not row["sketch"]]
    for name in CLUSTERERS:
        by_compression = spread(unsketched, ("method", "compress"), f"{name}_0")
        for key, (mean, *_) in by_compression.items():
            setting = ", ".join([*key, name])
            print(f"{setting}: ARI {mean:.3f} without noise")


def _print_runs(runs: Sequence[Row]) -> None:
    """Print mean and range over seeds of the results of whole runs."""
    keys = ("method", "sketch", "compress", "clusterer", "noise")
    for value in ("ari", "accuracy", "epsilon", "bytes", "up"):
        for key, statistics in spread(runs, keys, value).items():
            setting = ", ".join(key)
            print(f"run {setting}: {value} {shown_spread(statistics)}")


def picture(rows: Sequence[Row]) -> Any:
    """Draw ARI over σ/S, with a panel for each method and a colour for each sketch.

    Lines are solid for the paper's clusterer, and broken for average linkage.
    """
    drawing, axes = figure(9, 3.6, 1, len(METHODS))
    styles = {"paper": "-", "average": "--"}
    # a logarithmic axis has no 0, which is drawn at half the smallest noise
    x = [max(sigma, SIGMAS[1] / 2) for sigma in SIGMAS]
    for axis, method in zip(axes[0], METHODS, strict=True):
        of_method = [row for row in rows if row["method"] == method]
        for colour, q in enumerate(SKETCHES):
            # a whole update has no sketch in its row
            sketch = str(q or "")
            selected = [row for row in of_method if row["sketch"] == sketch]
            width = q or "whole update"
            for clusterer, style in styles.items():
                means = _means(selected, clusterer)
                label = f"{width}, {clusterer}"
                axis.semilogx(x, means, style, color=f"C{colour}", label=label)
        axis.set(title=method, xlabel="σ/S (leftmost: 0)", ylabel="ARI")
        axis.set(ylim=(-0.05, 1.05))
    axes[0][0].legend(fontsize=7)
    return drawing


def _means(rows: Sequence[Row], clusterer: str) -> list[float]:
    """Return the mean ARI for each noise; NaN where it was not measured.

    Args:
        rows: the rows of one method and one sketch.
        clusterer: a name of `CLUSTERERS`.
    """
    means = []
    for sigma in SIGMAS:
        mean = float("nan")
        by_method = spread(rows, ("method",), f"{clusterer}_{sigma:g}")
        for statistics in by_method.values():
            mean = statistics[0]
        means.append(mean)
    return means


def report(rows: Sequence[Row]) -> None:
    """Print what is borne offline and in runs.

    Args:
        rows: of the sheet.
    """
    done = [row for row in rows if row["status"] == DONE]
    updates = [row for row in done if row["of"] == "updates"]
    _print_updates(updates, _uncompressed(done))
    _print_runs([row for row in done if row["of"] == "run"])


def _uncompressed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of updates that are not compressed.

    Args:
        rows: of the sheet; those that were not run are left out.
    """
    criteria = {"status": DONE, "of": "updates", "compress": "none"}
    return [row for row in rows if criteria.items() <= row.items()]


GRID = Grid(
    __doc__,
    "sketches",
    cells,
    measure,
    report=report,
    draw=lambda rows: picture(_uncompressed(rows)),
)

if __name__ == "__main__":
    print(GRID.main())
