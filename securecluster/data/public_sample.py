"""Public samples, on which a plan simulates runs, since nobody may look at private data yet.

A sample is a known data set by its name, such as the digits of scikit-learn, or one that the user
hands in. Three quarters of it are trained on and a quarter is for testing. Where it has fewer rows
than the clients want, rows are repeated, in one client no sooner than in all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.noted_warnings import noted
from securecluster.core.randomness import Randomness
from securecluster.data.dataset import Source
from securecluster.data.datasets import SOURCES, source
from securecluster.data.federation import Federation
from securecluster.data.pools import ArrayPool
from securecluster.data.scenarios import Scenario
from securecluster.errors import UsageError, quoted, unknown
from securecluster.models.objectives import CLASSIFICATION

MOST_ROWS = 20_000  # of a sample; more tell a simulation nothing
OWN_SAMPLE = "your public sample"
BREAST_CANCER = "breast_cancer"
NAMES = (*SOURCES, BREAST_CANCER)


@dataclass(frozen=True)
class PublicSample:
    """Samples that anybody may see.

    Args:
        name: of the data set.
        x: samples (n, …), float32.
        y: labels (n,), int64 in 0 … classes − 1.
        classes: number of labels.
        notes: what is to be known of it, in sentences.
    """

    name: str
    x: NDArray[Any]
    y: NDArray[Any]
    classes: int
    notes: tuple[str, ...] = ()

    def clients(self, clients: int, samples: int, scenario: Scenario, seed: int) -> Federation:
        """Return simulated clients, whose rows are of the sample.

        Args:
            clients: how many.
            samples: that each trains on; it tests on a quarter as many.
            scenario: how clusters differ.
            seed: of all draws.

        Raises:
            UsageError: a sample of fewer than eight rows, or clients that the scenario cannot make.
        """
        if len(self.y) < 8:
            raise UsageError(
                f"{self.name} has {len(self.y)} rows: a simulation needs eight, and better hundreds"
            )
        draw = Randomness(seed).generator("public sample", "rows")
        order = draw.permutation(len(self.y))
        held_out, learned = np.split(order, [max(1, len(order) // 4)])
        test = max(1, -(-samples // 4))
        # where labels are skewed, clients want more of some than rows have on average
        copies = 1
        while True:
            pools = []
            for rows, row_count in ((learned, clients * samples), (held_out, clients * test)):
                # whole copies of the sample, and the beginning of one
                some = np.resize(rows, row_count * copies)
                pools.append(ArrayPool(self.x[some], self.y[some]))
            shape = tuple(self.x.shape[1:])
            made = Source(self.name, self.classes, shape, pools[0], pools[1])
            last = copies > self.classes
            copies *= 2
            try:
                federation = Federation.simulate(
                    made, scenario=scenario, clients=clients, samples=samples, seed=seed
                )
            except UsageError:
                if last:
                    raise
                continue
            if last or min(len(shard.y_test) for shard in federation.shards) >= test:
                return federation

    def repeats(self, clients: int, samples: int) -> float:
        """Return how often each row is trained on by some client; at most 1 without repetition.

        Args:
            clients: how many.
            samples: that each trains on.
        """
        return clients * samples / max(1, len(self.y) - len(self.y) // 4)


def public_sample(
    public: Any = "digits", label_column: str | None = None, client_column: str | None = None
) -> PublicSample:
    """Return a public sample.

    Args:
        public: the name of a data set with labels, `breast_cancer` among them; the path of a CSV
            file of numbers; a pair (x, y) of arrays; or a federation.
        label_column: of a file, the column with the labels; all others are features.
        client_column: of a file, the column that names clients, if there is one.

    Raises:
        UsageError: none of these, or nothing to learn.
    """
    is_path = isinstance(public, str | Path) and str(public) not in NAMES
    if not is_path and (label_column, client_column) != (None, None):
        raise UsageError(
            "label_column and client_column are of a CSV file, and public is none: name the file "
            "(--public FILE), or leave them out"
        )
    if isinstance(public, Federation):
        return _of_federation(public)
    if isinstance(public, tuple | list) and len(public) == 2:
        return _noted(lambda: Federation.from_arrays({"public": tuple(public)}, seed=0))
    if not isinstance(public, str | Path):
        raise UsageError(
            f"public = {quoted(public)} is no sample: give the name of a data set, a CSV file, or "
            "arrays (x, y)"
        )
    text = str(public)
    if text == BREAST_CANCER:
        return _breast_cancer()
    if text in SOURCES:
        return _of_source(source(text))
    if Path(text).suffix != ".csv" and not os.path.exists(text):  # false for any impossible path
        raise unknown("public sample", text, NAMES)
    return _of_file(Path(text), label_column, client_column)


def _breast_cancer() -> PublicSample:
    """Return scikit-learn's breast cancer table: 569 rows of 30 standardised numbers, two labels.

    The table is part of scikit-learn, and nothing is downloaded.
    """
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    scaled = (x - x.mean(axis=0)) / x.std(axis=0)
    return PublicSample(BREAST_CANCER, scaled.astype(np.float32), y.astype(np.int64), 2)


def _of_source(dataset: Source) -> PublicSample:
    """Return the beginning of a data set, in a random order.

    Raises:
        UsageError: its samples have no labels.
    """
    if dataset.objective is not CLASSIFICATION:
        raise UsageError(
            f"{dataset.name} has no labels to learn: a plan takes a sample for classification"
        )
    rows = np.random.default_rng(0).permutation(len(dataset.train.y))[:MOST_ROWS]
    x, y = dataset.train.read(rows), dataset.train.y[rows]
    return PublicSample(dataset.name, x, y, dataset.classes)


def _of_file(path: Path, label_column: str | None, client_column: str | None) -> PublicSample:
    """Return the rows of a CSV file.

    Raises:
        UsageError: no such file, or no label column.
    """
    from securecluster.core.optional_packages import need

    if label_column is None:
        raise UsageError(f"{path} needs the name of the column with the labels (--label-column)")
    pandas = need("pandas")
    try:
        rows = pandas.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as a CSV file ({type(error).__name__}): check the path"
        ) from None
    if client_column is None:
        client_column = "public sample"
        while client_column in rows.columns:
            client_column += "'"
        rows = rows.assign(**{client_column: 0})
    return _noted(
        lambda: Federation.from_frame(rows, client=client_column, label=label_column, seed=0)
    )


def _noted(read: Callable[[], Federation]) -> PublicSample:
    """Return the samples of a federation, with its doubts about them as notes.

    Args:
        read: makes the federation.
    """
    doubts: list[str] = []
    with noted(doubts.append):
        sample = _of_federation(read())
    return replace(sample, notes=(*sample.notes, *doubts))


def _of_federation(federation: Federation) -> PublicSample:
    """Return the samples of the client that has most; labels of others may mean something else.

    Raises:
        UsageError: its samples have no labels.
    """
    if federation.objective.kind != CLASSIFICATION.kind:
        raise UsageError("public has no labels to learn: a plan takes a sample for classification")
    rows = [len(shard.y) + len(shard.y_test) for shard in federation.shards]
    largest = int(np.argmax(rows))
    shard = federation.shards[largest]
    x, y = shard.x, shard.y
    if len(shard.y_test):
        x = np.concatenate([x, shard.x_test])
        y = np.concatenate([y, shard.y_test])
    notes: tuple[str, ...] = ()
    if len(federation) > 1:
        notes = (
            f"of {OWN_SAMPLE} the {len(y):,} rows of {federation.names[largest]} are used, of all "
            f"{len(federation)} clients the most: what a label means may differ between clients",
        )
    return PublicSample(OWN_SAMPLE, x, y, federation.classes, notes)
