"""Clusters of clients whose samples are news as hashed words, which are sparse.

python -m benchmarks.clusters.text [--seeds 1 2 3 4 5] [--settings swaps]

20 clients with 300 articles of AG-News each, and 100 that are held out; the label is the topic. An
article is 512 counts of hashed words, of norm 1.

- `swaps`: two clusters, which have swapped labels of other two topics.
- `topics`: four clusters, of which each has one topic in seven of ten articles.
- `swaps, directions`: `swaps`, and counts of 2048 words are projected on 20 public directions, in
  which a tenth of the articles, which are no client's, vary most; then the norm is 1 again.
- `swaps, random`: likewise with 20 random directions.

Models are linear. Each method has one learning rate of several, and fine-tuning one of its shares,
which was the most accurate on seed 100. Without noise there are 40 rounds of one epoch; private
runs have ten rounds of one step on all samples, and a target ε of 4 for an example. `ifca` is told
the number of clusters, and so are methods with `k`. Rows are written as they are measured; texts
are in the folder ag_news of SECURECLUSTER_DATA.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.rivals import KEY, SHARES, TUNED_ON, chosen, tuned
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS, UNRECORDED, Journal
from securecluster import Federation
from securecluster.clustering.metrics import mean
from securecluster.core.randomness import Randomness
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    Hidden,
    Local,
    OneShot,
    Signature,
)

COLUMNS = (*KEY, "ari", "clusters", "accuracy")
SETTINGS = {"swaps": 2, "topics": 4, "swaps, directions": 2, "swaps, random": 2}  # clusters
SEEDS = (1, 2, 3, 4, 5)
CLIENTS = 20
SAMPLES = 300
HELD_OUT = 100
TOPICS = 4
MAIN_SHARE = 0.7  # of a client's own topic
PUBLIC = 12_000  # first articles of the file, which are no client's
WORDS, WORDS_BEFORE, DIRECTIONS = 512, 2048, 20
ROUNDS = 40
RATES = (1.0, 4.0)
ROUNDS_PRIVATE = 10
RATES_PRIVATE = (2.0, 8.0)
PRIVATE: dict[str, Any] = {
    "target_epsilon": 4.0,
    "dp_unit": "example",
    "clip": 1.0,
    "batch_size": 10_000,  # more than any client has
}
FINETUNE = "finetune"
Features = NDArray[np.float32]
Made = Callable[[int, dict[str, Any]], ClusteringProtocol]
METHODS: Mapping[str, Made] = {
    "fedavg": lambda k, options: FedAvg(**options),
    "local": lambda k, options: Local(**options),
    "cfl": lambda k, options: CFL(**options),
    "flhc": lambda k, options: FLHC(**options),
    "srfca": lambda k, options: SRFCA(
        **{**options, "rounds": options["rounds"] // 2}, local_rounds=options["rounds"] // 2
    ),
    "ifca": lambda k, options: IFCA(**options, k=k),
    "oneshot": lambda k, options: OneShot(**options),
    "signature": lambda k, options: Signature(**options),
    "signature, k": lambda k, options: Signature(**options, k=k),
}
# noise for single clients, which are twenty, would hide everything
NOT_PRIVATE: Mapping[str, Made] = {"hidden, k": lambda k, options: Hidden(**options, k=k)}
AT_EPSILON = ", ε 4"


@cache
def articles() -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return all training articles and their topics."""
    import pandas as pd

    file = Path(os.environ["SECURECLUSTER_DATA"]) / "ag_news" / "train.parquet"
    table = pd.read_parquet(file, columns=["text", "label"])
    return table["text"].to_numpy(object), table["label"].to_numpy(np.int64)


def hashed(texts: NDArray[Any], words: int) -> Any:
    """Return counts of hashed words of norm 1, as a sparse matrix (n, words)."""
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(n_features=words, alternate_sign=False).transform(texts)


@cache
def basis(setting: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean of the public articles, (words,), and directions (20, words)."""
    from sklearn.decomposition import TruncatedSVD

    texts, _ = articles()
    public = hashed(texts[:PUBLIC], WORDS_BEFORE)
    centre = np.asarray(public.mean(0))[0]
    if setting == "swaps, random":
        return centre, Randomness(0).generator("directions").normal(size=(DIRECTIONS, WORDS_BEFORE))
    return centre, TruncatedSVD(DIRECTIONS, random_state=0).fit(public).components_


def features(setting: str, texts: NDArray[Any]) -> Features:
    """Return what a client trains on, (n, f) of norm 1.

    Args:
        setting: among `SETTINGS`.
        texts: (n,)
    """
    if "," not in setting:
        return hashed(texts, WORDS).toarray().astype(np.float32)
    centre, directions = basis(setting)
    projected = hashed(texts, WORDS_BEFORE) @ directions.T - directions @ centre
    norms = np.linalg.norm(projected, axis=1, keepdims=True)
    return (projected / np.maximum(norms, 1e-6)).astype(np.float32)


@lru_cache(maxsize=1)
def federation(setting: str, seed: int) -> Federation:
    """Return a setting's clients, no two of which have an article in common.

    Args:
        setting: among `SETTINGS`.
        seed: of the articles, the swaps and the run.
    """
    texts, topics = articles()
    draw = Randomness(seed).generator("text")
    clusters = SETTINGS[setting]
    pairs = draw.permutation(TOPICS).reshape(-1, 2)
    rows_of_topic = []
    for topic in range(TOPICS):
        rows = PUBLIC + np.flatnonzero(topics[PUBLIC:] == topic)
        rows_of_topic.append(draw.permutation(rows))
    taken = np.zeros(TOPICS, dtype=np.int64)
    train, test, truth = {}, {}, {}
    for i, cluster in enumerate(np.repeat(range(clusters), CLIENTS // clusters).tolist()):
        shares = np.full(TOPICS, 1 / TOPICS)
        names = np.arange(TOPICS)
        if setting == "topics":
            shares[:] = (1 - MAIN_SHARE) / (TOPICS - 1)
            shares[cluster] = MAIN_SHARE
        else:
            names[pairs[cluster]] = pairs[cluster][::-1]
        counts = draw.multinomial(SAMPLES + HELD_OUT, shares)
        own = [
            rows[start : start + count]
            for rows, start, count in zip(rows_of_topic, taken, counts, strict=True)
        ]
        taken += counts
        chosen_rows = draw.permutation(np.concatenate(own))
        x, y = features(setting, texts[chosen_rows]), names[topics[chosen_rows]]
        name = f"client{i:02d}"
        train[name], test[name] = (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])
        truth[name] = cluster
    return Federation.from_arrays(train, test=test, classes=TOPICS, seed=seed, truth=truth)


def forms() -> Iterator[tuple[str, str, float]]:
    """Yield each method with the options among which its own are chosen: share and rate."""
    for method in (*METHODS, *NOT_PRIVATE):
        for rate in RATES:
            yield method, "", rate
    for share, rate in product(SHARES, RATES):
        yield FINETUNE, share, rate
    for method in METHODS:
        for rate in RATES_PRIVATE:
            yield method + AT_EPSILON, "", rate
    for share, rate in product(SHARES[1:], RATES_PRIVATE):
        yield FINETUNE + AT_EPSILON, share, rate


def measured(cell: Cell) -> dict[str, Any]:
    """Return a cell with its clusters and accuracy.

    Args:
        cell: with all columns of the key.
    """
    setting = cell["scenario"]
    name, private, _ = cell["method"].partition(AT_EPSILON)
    options: dict[str, Any] = {"model": "linear", "lr": cell["rate"], "mask": "none"}
    rounds = ROUNDS_PRIVATE if private else ROUNDS
    if private:
        options |= PRIVATE
    if name == FINETUNE:
        protocol = tuned(options, rounds, cell["share"], 1.0)
    else:
        made = {**METHODS, **NOT_PRIVATE}[name]
        protocol = made(SETTINGS[setting], {**options, "rounds": rounds})
    fitted = protocol.fit(federation(setting, cell["seed"]), UNRECORDED)
    assert fitted.agreement_ is not None
    return {
        **cell,
        "ari": round(fitted.agreement_["ari"], 4),
        "clusters": len(set(fitted.labels_.tolist())),
        "accuracy": round(mean(fitted.scores_) or 0.0, 4),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS / "text.csv")
    options = parser.parse_args(arguments)
    journal = Journal(options.out, KEY, COLUMNS)

    def fill(setting: str, method: str, share: str, rate: float, seed: int) -> None:
        cell = dict(zip(KEY, (setting, method, share, rate, seed), strict=True))
        if journal.lacks(cell):
            journal.append([measured(cell)])

    for setting in options.settings:
        for method, share, rate in forms():
            fill(setting, method, share, rate, TUNED_ON)
        for seed in options.seeds:
            for method in dict.fromkeys(name for name, _, _ in forms()):
                best = chosen(options.out, setting, method)
                fill(setting, method, best["share"], float(best["rate"]), seed)


if __name__ == "__main__":
    main()
