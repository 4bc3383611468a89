"""Numbers of single clients, from coordinates of sums of updates that they alone moved.

The attack reads the weights of features that are rare: the columns of a category or the row of a
word in the first layer. Rare are those of which public samples have few; and of those that move in
some sums and not in others the ones that a single member may have moved. Where the network is
linear, a column of the first round tells the labels of the records that have the feature, as the
last bias tells those of all (`label_counts`). The row of a hidden unit moves where some record
activates it: one that is dead (ReLU) for everybody else's is read alike.

Where three members move each coordinate, and in sums with noise, nothing is read. A permutation
keeps the numbers and hides which feature they are of, until a client undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from securecluster.attacks.arrays import Array, as_array, flat_rows
from securecluster.attacks.base import MASK, SUMS, TAPS, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.label_counts import local_steps, mean_prediction, normalised
from securecluster.attacks.lone_members import (
    COLUMNS,
    MEMBERS,
    SCALED,
    SOURCE,
    OfTrueRows,
    ReadRow,
    RowsRead,
    Subject,
    undoing,
)
from securecluster.attacks.views import observed_sums
from securecluster.core.lazy_torch import torch

UPDATES = ("delta", "blocks")
RAREST = 16  # features that are read
MOST_RECORDS = 64  # with a rare feature, of one client
EXCESS = 0.25  # by which a guessed count may lie beside a whole number
FIRST_ROUND = 1
MATRIX = 2  # dimensions of a layer's weights, and of rows with blocks
LABELS = "labels"  # detail of a guess: counts of the labels of records with a feature, by subject


class CategoryLabels(OfTrueRows):
    """Share of the records with a feature whose label the guess misplaces."""

    metric = "share of misplaced labels among the records with a rare feature"
    higher = False

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return why there is no such score; None if there is one.

        Args:
            guess: the attack's.
            truth: of the run, with taps.
        """
        if not self._read(guess, truth):
            return "no feature of one client was read in the first round of a linear network"
        return None

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the share of each feature that was read, (n,).

        Args:
            guess: the attack's.
            truth: of the run, with taps.
        """
        shares = []
        for subject, client in self._read(guess, truth).items():
            shard = truth.federation.shards[client]
            has = _has_feature(np.asarray(shard.x), subject[-1])
            shares.append(_misplaced(guess.details[LABELS][subject], np.asarray(shard.y)[has]))
        return np.asarray(shares)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for as many records of the client that do not matter here.

        Args:
            guess: the attack's.
            truth: of the run, with taps.
            draw: source of the records.
        """
        shares = []
        for subject, client in self._read(guess, truth).items():
            labels = np.asarray(truth.federation.shards[client].y)
            counts = guess.details[LABELS][subject]
            records = draw.choice(labels, min(len(labels), int(counts.sum())), replace=False)
            shares.append(_misplaced(counts, records))
        return np.asarray(shares)

    def _read(self, guess: Guess, truth: Truth) -> dict[Subject, int]:
        """Return the one client whose column was read, by subject with labels."""
        measured = self.measured(guess, truth)
        read = {}
        for subject in guess.details.get(LABELS, {}):
            errors = measured[subject]
            if errors.read and len(errors.owners) == 1:
                read[subject] = errors.owners[0]
        return read


class SingleCoordinates(Attack):
    """Numbers of single clients, from coordinates of sums of updates that they alone moved."""

    name = "sums-single-coordinate"
    learns = "what a client learned of a category or a word that it alone has, and its labels"
    harm = Harm.CONTENTS
    source = SOURCE
    needs = (
        "sums of updates without a mask or with a client that undoes it, a first layer whose "
        "columns or rows have a meaning, and public samples or sums over different members"
    )
    scorer = RowsRead("rare features or units")
    further = (CategoryLabels(),)
    requires = (TAPS,)
    reads = UPDATES
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        parts = _parts(knowledge)
        if not parts:
            return "not applicable: the first layer has no weights for each feature or word"
        if knowledge.mask != "none" and undoing(knowledge) is None:
            return (
                "not applicable: a mask hides which coordinate is which feature, and no client "
                "undoes it"
            )
        rows = list(_rows_of_updates(view, knowledge))
        if not rows:
            return "not applicable: no sums of updates were observed"
        if not any(part.candidates(rows, knowledge) for part in parts):
            return "not applicable: neither public samples nor several sums tell rare features"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the weights of rare features, each in the first sum that moves them.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        rows = list(_rows_of_updates(view, knowledge))
        others = frozenset(range(knowledge.clients)) - frozenset(knowledge.colluders)
        sizes = _mean_sizes(view)
        values: dict[Subject, Array] = {}
        members = {}
        labels = {}
        columns = {}
        for part in _parts(knowledge):
            for feature in part.candidates(rows, knowledge):
                column = part.column(feature)
                row = next(row for row in rows if row.values[column].any())
                subject = row.subject(part.number + feature)
                values[subject] = row.values[column]
                members[subject] = row.members & others
                columns[subject[-1]] = column
                size = sizes.get(row.step)
                if part.tells_labels and row.round == FIRST_ROUND and size is not None:
                    labels[subject] = part.labels(feature, values[subject], knowledge, size)
        details = {
            MEMBERS: members,
            SCALED: knowledge.config.get("clip") is not None,
            LABELS: labels,
            COLUMNS: columns,
        }
        return Guess("weights of rare features", values, details)


@dataclass(frozen=True)
class Features:
    """The features or words that the weights of a first layer belong to.

    Args:
        first: coordinate of the first weight.
        shape: of the weights: (outputs, features), or (words, width) of an embedding.
        words: True of an embedding.
        tells_labels: True if the outputs are those of the network, one a class.
    """

    first: int
    shape: tuple[int, int]
    words: bool
    tells_labels: bool
    number: ClassVar[int] = 0  # what subjects call the first one

    @classmethod
    def of(cls, knowledge: Knowledge) -> Features | None:
        """Return those of a network; None of one whose first layer has other weights.

        Args:
            knowledge: of the network.
        """
        name, shape = next(iter(knowledge.network.shapes.items()))
        if len(shape) != MATRIX:
            return None
        rows, columns = int(shape[0]), int(shape[1])
        first = knowledge.slices[name].start
        task = knowledge.network.objective.kind
        if task == "language":
            return cls(first, (rows, columns), words=True, tells_labels=False)
        if columns != math.prod(knowledge.config["shape"]):
            return None
        linear = knowledge.has_labels and rows == knowledge.classes
        linear = linear and rows * (columns + 1) == knowledge.dimension
        return cls(first, (rows, columns), words=False, tells_labels=linear)

    @cached_property
    def count(self) -> int:
        """Return the number of features, or of words."""
        return self.shape[0] if self.words else self.shape[1]

    def column(self, feature: int) -> list[int]:
        """Return the coordinates of the weights of a feature.

        Args:
            feature: its number.
        """
        rows, columns = self.shape
        if self.words:
            return [self.first + feature * columns + k for k in range(columns)]
        return [self.first + k * columns + feature for k in range(rows)]

    def moved(self, values: Array) -> Array:
        """Return which features have a weight that moves, (features,).

        Args:
            values: of a row, (d,) or wider.
        """
        rows, columns = self.shape
        weights = values[self.first : self.first + rows * columns].reshape(rows, columns)
        return np.asarray((weights != 0).any(1 if self.words else 0))

    def candidates(self, rows: Sequence[ReadRow], knowledge: Knowledge) -> list[int]:
        """Return the features that a single client may have, the likeliest first.

        Args:
            rows: of sums of updates.
            knowledge: with public samples, if it has any.
        """
        displaced = np.stack([self.moved(row.values) for row in rows])
        possible = self._possible(rows, displaced)
        # without samples only a sum that does not move a feature tells of it
        eligible = displaced.any(0) & ~displaced.all(0)
        public_counts = np.zeros(self.count)
        if knowledge.samples is not None:
            public_counts = self._seen(knowledge)
            eligible = displaced.any(0)
        # who moves it in all sums that do, and in no other, is at least one client
        eligible &= possible > 0
        order = np.lexsort((possible, public_counts))
        chosen = [int(feature) for feature in order if eligible[feature]]
        return chosen[:RAREST]

    def _possible(self, rows: Sequence[ReadRow], displaced: Array) -> Array:
        """Return how many clients may be the only one that moves a feature, (features,)."""
        clients = 1 + max(max(row.members) for row in rows)
        inside = np.zeros((len(rows), clients), dtype=bool)
        for k, row in enumerate(rows):
            inside[k, list(row.members)] = True
        # the only one is in every sum that moves, and in none that does not
        agrees = np.zeros((clients, self.count), dtype=int)
        for is_inside, moves in zip(inside, displaced, strict=True):
            agrees += is_inside[:, None] == moves[None, :]
        return np.asarray((agrees == len(rows)).sum(0))

    def _seen(self, knowledge: Knowledge) -> Array:
        """Return how many public samples have each feature, (features,)."""
        inputs = knowledge.inputs
        if self.words:
            counts = np.zeros(self.count)
            for sample in inputs.reshape(len(inputs), -1):
                counts[np.unique(sample.astype(int))] += 1
            return counts
        return np.asarray((inputs.reshape(len(inputs), -1) != 0).sum(0), dtype=float)

    def labels(self, feature: int, values: Array, knowledge: Knowledge, size: float) -> Array:
        """Return the counts of the labels of the records with a feature, (classes,).

        A step moves the weights of a feature with value 1 by η/n·(n_c − N·p̄_c), where N records
        have it, n_c of class c. N is the number that makes counts whole.

        Args:
            feature: its number.
            values: of its weights in a sum of updates times numbers of samples, (classes,).
            knowledge: of the configuration.
            size: number of samples of a client.
        """
        steps = local_steps(knowledge, size)
        value = self._value(feature, knowledge)
        moves = values / (float(knowledge.config["lr"]) * steps * value)
        prediction = mean_prediction(self._with_feature(feature, value, knowledge))
        minimum = max(1, math.ceil(float((-moves / prediction).max()) - EXCESS))
        for records in range(minimum, minimum + MOST_RECORDS):
            counts = moves + records * prediction
            rounded = np.rint(np.clip(counts, 0, None))
            if np.abs(counts - rounded).max() < EXCESS and rounded.sum() == records:
                return np.asarray(rounded)
        return normalised(moves + minimum * prediction) * minimum

    def _with_feature(self, feature: int, value: float, knowledge: Knowledge) -> Knowledge:
        """Return the same public samples as if all of them had a feature."""
        if knowledge.samples is None:
            return knowledge
        inputs = knowledge.inputs.copy()
        inputs.reshape(len(inputs), -1)[:, feature] = value
        return replace(knowledge, samples=(inputs, knowledge.labels))

    def _value(self, feature: int, knowledge: Knowledge) -> float:
        """Return the value that a record with a feature has: 1, unless public samples tell."""
        if knowledge.samples is None:
            return 1.0
        column = knowledge.inputs.reshape(len(knowledge.inputs), -1)[:, feature]
        present = column[column != 0]
        return float(np.median(present)) if len(present) else 1.0


class Units(Features):
    """The hidden units that the rows of a first layer belong to."""

    number: ClassVar[int] = 1 << 32  # beyond all features

    @classmethod
    def of(cls, knowledge: Knowledge) -> Units | None:
        """Return those of a network; None where the first layer is the last one, or of words."""
        features = Features.of(knowledge)
        if features is None or features.words or len(knowledge.network.shapes) <= MATRIX:
            return None
        return cls(features.first, features.shape, words=False, tells_labels=False)

    @cached_property
    def count(self) -> int:
        """Return the number of units."""
        return self.shape[0]

    def column(self, feature: int) -> list[int]:
        """Return the coordinates of the weights of a unit."""
        columns = self.shape[1]
        return [self.first + feature * columns + k for k in range(columns)]

    def moved(self, values: Array) -> Array:
        """Return which units have a weight that moves, (units,)."""
        weights = values[self.first : self.first + math.prod(self.shape)].reshape(self.shape)
        return np.asarray((weights != 0).any(1))

    def _seen(self, knowledge: Knowledge) -> Array:
        """Return how many public samples activate each unit at θ_0, (units,)."""
        weights, biases = list(knowledge.parameters(knowledge.initial).values())[:2]
        if biases.shape != weights.shape[:1]:
            biases = torch.zeros(len(weights))
        before = flat_rows(knowledge.inputs) @ as_array(weights).T + as_array(biases)
        return np.asarray((before > 0).sum(0), dtype=float)


def _parts(knowledge: Knowledge) -> list[Features]:
    """Return the features or words, and the hidden units, that a first layer has weights for."""
    found = (Features.of(knowledge), Units.of(knowledge))
    return [part for part in found if part is not None]


def _rows_of_updates(view: View, knowledge: Knowledge) -> Iterator[ReadRow]:
    """Yield the sums of updates, block by block, without their mask."""
    undo = undoing(knowledge)
    for field in UPDATES:
        groups: dict[int, int] = {}
        for observed in observed_sums(view, field):
            rows = observed.row if observed.row.ndim == MATRIX else observed.row[None]
            if rows.shape[-1] != knowledge.width or not observed.members:
                continue
            group = groups.setdefault(observed.step, 0)
            groups[observed.step] += 1
            if undo is not None:
                rows = undo(rows, observed.step)
            for block, values in enumerate(as_array(rows)):
                yield ReadRow(
                    observed.step, field, group, block, observed.round, observed.members, values
                )


def _mean_sizes(view: View) -> dict[int, float]:
    """Return by call the mean number of samples of a client, where these are summed."""
    sizes = {}
    for observed in observed_sums(view, "size"):
        sizes[observed.step] = float(observed.row.sum()) / max(1, len(observed.members))
    return sizes


def _misplaced(counts: Array, labels: Array) -> float:
    """Return the share of labels that counts misplace."""
    true = np.bincount(labels.astype(int), minlength=len(counts)).astype(float)
    shares = true / max(1.0, true.sum())
    return float(np.abs(normalised(counts) - shares).sum()) / 2


def _has_feature(inputs: Array, feature: int) -> Any:
    """Return which records have a feature, (n,)."""
    return inputs.reshape(len(inputs), -1)[:, feature] != 0
