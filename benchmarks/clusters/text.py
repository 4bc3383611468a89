"""Clusters of clients whose samples are news as hashed words, which are sparse.

python -m benchmarks.clusters.text [--seeds 1 2 3 4 5] [--settings swaps]

The last two settings are for `benchmarks.clusters.text_signatures`.

20 clients with 300 articles of AG-News each, and 100 that are held out; the label is the topic. An
article is 512 counts of hashed words, of norm 1.

- `swaps`: two clusters, which have swapped labels of other two topics.
- `topics`: four clusters, of which each has one topic in seven of ten articles.
- `swaps, directions`: as `swaps`, and counts of 2048 words are projected on 20 public directions,
  in which other articles, which are no client's, vary most; then the norm is 1 again.
- `swaps, random`: likewise with 20 random directions.

Models are linear, and there are 20 rounds of one epoch. Private runs have a target ε of 4 for an
example, and ten rounds of one step on all samples. Fine-tuning is the best of six forms on a seed
of its own (`benchmarks.papers.rivals`); private, it has half of the rounds. `k` and `ifca` are told
the number of clusters. Rows are written as they are measured; texts are in the folder ag_news of
SECURECLUSTER_DATA.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.rivals import KEY, Comparison, fill, tuned
from benchmarks.sheet import Cell
from benchmarks.table import UNRECORDED
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
TRAINING: dict[str, Any] = {"model": "linear", "mask": "none", "lr": 2.0, "rounds": 20}
PRIVATE: dict[str, Any] = {
    "target_epsilon": 4.0,
    "dp_unit": "example",
    "clip": 1.0,
    "lr": 4.0,
    "rounds": 10,
    "batch_size": 10_000,  # more than any client has
}
Features = NDArray[np.float32]
METHODS: dict[str, Callable[[int, dict[str, Any]], ClusteringProtocol]] = {
    "fedavg": lambda k, options: FedAvg(**options),
    "local": lambda k, options: Local(**options),
    "cfl": lambda k, options: CFL(**options),
    "flhc": lambda k, options: FLHC(**options, pre_rounds=options["rounds"] // 2),
    "oneshot": lambda k, options: OneShot(**options),
    "ifca": lambda k, options: IFCA(**options, k=k),
    "signature": lambda k, options: Signature(**options),
    "signature, k": lambda k, options: Signature(**options, k=k),
}
# without noise: SR-FCA trains twice, and noise for single clients, which are 20, hides everything
NOT_PRIVATE: dict[str, Callable[[int, dict[str, Any]], ClusteringProtocol]] = {
    "srfca": lambda k, options: SRFCA(**{**options, "rounds": 10}, local_rounds=10),
    "hidden, k": lambda k, options: Hidden(**options, k=k),
}
FINETUNE = "finetune"
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
        return np.asarray(hashed(texts, WORDS).toarray(), dtype=np.float32)
    centre, directions = basis(setting)
    projected = hashed(texts, WORDS_BEFORE) @ directions.T - directions @ centre
    norms = np.linalg.norm(projected, axis=1, keepdims=True)
    return np.asarray(projected / np.maximum(norms, 1e-6), dtype=np.float32)


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


def measured(cell: Cell) -> dict[str, Any]:
    """Return a cell with its clusters and accuracy.

    Args:
        cell: with all columns of the key.
    """
    setting = cell["scenario"]
    name, private, _ = cell["method"].partition(AT_EPSILON)
    options = {**TRAINING, **PRIVATE} if private else TRAINING
    if name == FINETUNE:
        rounds = options["rounds"]
        of_training = {option: options[option] for option in options if option != "rounds"}
        protocol = tuned(of_training, rounds, cell["share"] or "half", cell["rate"])
    else:
        protocol = {**METHODS, **NOT_PRIVATE}[name](SETTINGS[setting], options)
    fitted = protocol.fit(federation(setting, cell["seed"]), UNRECORDED)
    assert fitted.agreement_ is not None
    return {
        **cell,
        "ari": round(fitted.agreement_["ari"], 4),
        "clusters": len(set(fitted.labels_.tolist())),
        "accuracy": round(mean(fitted.scores_) or 0.0, 4),
    }


NAMES = (*METHODS, *NOT_PRIVATE, *(name + AT_EPSILON for name in (*METHODS, FINETUNE)))
COMPARISON = Comparison("text", ("swaps", "topics"), SEEDS, NAMES, COLUMNS, measured)

if __name__ == "__main__":
    fill(COMPARISON, __doc__)
