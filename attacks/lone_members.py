"""What hidden sums show of clients that are alone in a block, or in a coordinate.

A secure sum hides a summand behind the others, as far as the others add anything. A block that one
member fills, such as that of a cluster, a cell or a class, is that member's row. A coordinate that
one member moves, such as the column of a category or the row of a word in the first layer, is its
own number (Suimon et al. 2025, Per-element Secure Aggregation, arXiv 2508.04285). Nobody lies for
it, and no list of members tells of it.

`lone-blocks` reads every block that somebody filled as if it were one client's row. The server has
the sums. A client has the averages that it is sent, under no mask that it could not undo, and takes
its own update out of a block of two. Whose row a block is, is not claimed.

`sums-single-coordinate` reads the columns of features that are rare. Rare are those of which public
samples have few; and of those that move in some sums and not in others the ones that a single
member may have moved. Where the network is linear, a column of the first round tells the labels of
the records that have the feature, as the last bias tells those of all (`label_counts`).

Scores count rows that were read to within a thousandth. One is enough: chance reads none, and
nothing is estimated from a sample. In a sum of three in each block and each coordinate, and in one
with noise, nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import (
    MASK,
    SUMS,
    TAPS,
    Attack,
    Colluder,
    Guess,
    Harm,
    Knowledge,
    Truth,
    View,
)
from securecluster.attacks.label_counts import local_steps, mean_prediction, normalised
from securecluster.attacks.scoring import Scorer
from securecluster.attacks.views import observed_sums
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows
from securecluster.privacy.masking import masks

SOURCE = "Suimon et al. 2025, Per-element Secure Aggregation, arXiv 2508.04285"
BLOCKS = "blocks"
BLOCK_FIELDS = (BLOCKS, "cells", "steps", "parts")
UPDATES = ("delta", BLOCKS)
TOLERANCE = 1e-3  # relative error of a row that counts as read
RAREST = 16  # features that are read
MOST_RECORDS = 64  # with a rare feature, of one client
EXCESS = 0.25  # by which a guessed count may lie below zero
FIRST_ROUND = 1
TWO = 2  # members of a block of which a client takes its own row out
MATRIX = 2  # dimensions of a layer's weights
# details of guesses
MEMBERS = "members"  # by subject, the clients whose row it may be
SCALED = "scaled"  # True if rows are read up to their scale
LABELS = "labels"  # by subject, counts of the labels of the records with a feature

# call, field, number of the sum in the call (-1 of averages), block, feature (-1 of whole blocks)
Subject = tuple[int, str, int, int, int]


@dataclass(frozen=True)
class _Row:
    """A row of a sum or an average, as an adversary reads it.

    Args:
        step: number of the call whose replies were summed.
        field: of the replies.
        group: number of the sum in the call; -1 of an average.
        block: that the row is of.
        round: the protocol's round; 0 of an average.
        members: the clients of the sum; empty where these are not known.
        values: (width,).
    """

    step: int
    field: str
    group: int
    block: int
    round: int
    members: frozenset[int]
    values: Array

    def subject(self, feature: int = -1) -> Subject:
        """Return what a guess about it is called.

        Args:
            feature: that is read; -1 for the whole row.
        """
        return self.step, self.field, self.group, self.block, feature


class _TrueRows:
    """Rows before any protection, by call, field and block.

    Args:
        truth: of the run, with taps.
        guess: that they are compared with.
    """

    def __init__(self, truth: Truth, guess: Guess) -> None:
        self._guess = guess
        fields = {field for _, field, *_ in guess.values}
        self._rows: dict[tuple[int, str], dict[int, Array]] = {}
        for field in fields:
            for tap, client, row in truth.tapped_rows(field):
                values = as_array(row)
                blocks = values if values.ndim > 1 else values[None]
                self._rows.setdefault((tap.step, field), {})[client] = blocks
        self._columns: Mapping[int, Sequence[int]] = guess.details.get("columns", {})

    def owners(self, subject: Subject) -> dict[int, Array]:
        """Return by client what members of a sum moved of what was read.

        Args:
            subject: of the guess.
        """
        step, field, _, block, feature = subject
        members = self._guess.details[MEMBERS][subject]
        moved = {}
        for client, blocks in self._rows.get((step, field), {}).items():
            row = self._part(blocks[block], feature)
            if client in members and row.any():
                moved[client] = row
        return moved

    def strangers(self, subject: Subject) -> list[Array]:
        """Return what others moved in the place of what was read, or in other blocks.

        Args:
            subject: of the guess.
        """
        step, field, _, block, feature = subject
        owners = self.owners(subject)
        rows = []
        for client, blocks in self._rows.get((step, field), {}).items():
            if client not in owners:
                rows += [self._part(row, feature) for row in blocks if row.any()]
        return rows

    def error(self, subject: Subject, candidates: Sequence[Array]) -> float:
        """Return the smallest relative error of a guess as one of some rows; 1 of none.

        Args:
            subject: of the guess.
            candidates: rows.
        """
        read = self._guess.values[subject]
        scaled = self._guess.details[SCALED]
        return min((_error(read, row, scaled) for row in candidates), default=1.0)

    def _part(self, row: Array, feature: int) -> Array:
        if feature < 0:
            return row
        return np.asarray(row[list(self._columns[feature])])


class RowsRead(Scorer):
    """Number of rows that one client's row was read from, to within a thousandth."""

    counted: ClassVar[bool] = True

    def __init__(self, what: str) -> None:
        self.metric = f"{what} that are one client's own numbers"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each row that is one member's, and 0 for each other one, (n,).

        Args:
            guess: the attack's.
            truth: of the run, with taps.
        """
        return np.asarray(_errors(guess, truth) < TOLERANCE, dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for rows of clients that did not move what was read.

        Args:
            guess: the attack's.
            truth: of the run, with taps.
            draw: source of the rows.
        """
        return np.asarray(_errors(guess, truth, draw) < TOLERANCE, dtype=float)

    def summary(self, units: Array) -> float:
        """Return the number of rows that were read.

        Args:
            units: (n,).
        """
        return float(np.sum(units))


class SmallestError(Scorer):
    """Relative error of the row that is nearest to one client's."""

    metric = "smallest relative error to one client's own numbers"
    higher = False
    counted: ClassVar[bool] = True

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the relative error of each row to the nearest one of a member, (n,).

        Args:
            guess: the attack's.
            truth: of the run, with taps.
        """
        return _errors(guess, truth)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for rows of clients that did not move what was read.

        Args:
            guess: the attack's.
            truth: of the run, with taps.
            draw: source of the rows.
        """
        return _errors(guess, truth, draw)

    def summary(self, units: Array) -> float:
        """Return the smallest error.

        Args:
            units: (n,).
        """
        return float(np.min(units))


class CategoryLabels(Scorer):
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
        rows = _TrueRows(truth, guess)
        read = {}
        for subject in guess.details.get(LABELS, {}):
            owners = rows.owners(subject)
            if len(owners) == 1 and rows.error(subject, list(owners.values())) < TOLERANCE:
                read[subject] = next(iter(owners))
        return read


class LoneBlocks(Attack):
    """Rows of single clients, from blocks of sums or of averages that they alone filled."""

    name = "lone-blocks"
    learns = "the row of a client that is alone in a block, not whose it is"
    harm = Harm.MESSAGES
    source = SOURCE
    needs = (
        "sums with a block for each cluster, cell or class, or averages of all blocks that a "
        "client is sent"
    )
    scorer = RowsRead("blocks")
    further = (SmallestError(),)
    requires = (TAPS,)
    reads = BLOCK_FIELDS
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not any(True for _ in _rows_of_blocks(view, knowledge)):
            return "not applicable: no block that somebody filled was observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return what every block that somebody filled would be of one client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        others = frozenset(range(knowledge.clients)) - frozenset(knowledge.colluders)
        values: dict[Subject, Array] = {}
        members = {}
        of_averages = False
        for row in _rows_of_blocks(view, knowledge):
            subject = row.subject()
            values.setdefault(subject, row.values)
            members[subject] = (row.members or others) & others
            of_averages |= not row.members
        scaled = of_averages or knowledge.config.get("clip") is not None
        return Guess("rows of blocks", values, {MEMBERS: members, SCALED: scaled})


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
    scorer = RowsRead("rare features")
    further = (SmallestError(), CategoryLabels())
    requires = (TAPS,)
    reads = UPDATES
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        features = _Features.of(knowledge)
        if features is None:
            return "not applicable: the first layer has no weights for each feature or word"
        if knowledge.mask != "none" and _undoing(knowledge) is None:
            return (
                "not applicable: a mask hides which coordinate is which feature, and no client "
                "undoes it"
            )
        rows = list(_rows_of_updates(view, knowledge))
        if not rows:
            return "not applicable: no sums of updates were observed"
        if not features.candidates(rows, knowledge):
            return "not applicable: neither public samples nor several sums tell rare features"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the weights of rare features, each in the first sum that moves them.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        features = _Features.of(knowledge)
        assert features is not None
        rows = list(_rows_of_updates(view, knowledge))
        others = frozenset(range(knowledge.clients)) - frozenset(knowledge.colluders)
        sizes = _mean_sizes(view)
        values: dict[Subject, Array] = {}
        members = {}
        labels = {}
        columns = {}
        for feature in features.candidates(rows, knowledge):
            column = features.column(feature)
            row = next(row for row in rows if row.values[column].any())
            subject = row.subject(feature)
            values[subject] = row.values[column]
            members[subject] = row.members & others
            columns[feature] = column
            size = sizes.get(row.step)
            if features.tells_labels and row.round == FIRST_ROUND and size is not None:
                labels[subject] = features.labels(feature, values[subject], knowledge, size)
        details = {
            MEMBERS: members,
            SCALED: knowledge.config.get("clip") is not None,
            LABELS: labels,
            "columns": columns,
        }
        return Guess("weights of rare features", values, details)


@dataclass(frozen=True)
class _Features:
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

    @classmethod
    def of(cls, knowledge: Knowledge) -> _Features | None:
        """Return those of a network; None of one whose first layer has other weights.

        Args:
            knowledge: of the network.
        """
        name, shape = next(iter(knowledge.network.shapes.items()))
        if len(shape) != MATRIX:
            return None
        rows, columns = int(shape[0]), int(shape[1])
        first = knowledge.slices[name].start
        kind = knowledge.network.objective.kind
        if kind == "language":
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

    def candidates(self, rows: Sequence[_Row], knowledge: Knowledge) -> list[int]:
        """Return the features that a single client may have, the likeliest first.

        Args:
            rows: of sums of updates.
            knowledge: with public samples, if it has any.
        """
        moved = np.stack([self.moved(row.values) for row in rows])
        possible = self._possible(rows, moved)
        told = (possible < len(frozenset().union(*(row.members for row in rows)))) & moved.any(0)
        seen = np.zeros(self.count)
        if knowledge.samples is not None:
            seen = self._seen(knowledge)
            told = moved.any(0)
        # who moves it in all sums that do, and in no other, is at least one client
        told &= possible > 0
        order = np.lexsort((possible, seen))
        chosen = [int(feature) for feature in order if told[feature]]
        return chosen[:RAREST]

    def _possible(self, rows: Sequence[_Row], moved: Array) -> Array:
        """Return how many clients may be the only one that moves a feature, (features,)."""
        clients = 1 + max(max(row.members) for row in rows)
        inside = np.zeros((len(rows), clients), dtype=bool)
        for k, row in enumerate(rows):
            inside[k, list(row.members)] = True
        # the only one is in every sum that moves, and in none that does not
        agrees = np.zeros((clients, self.count), dtype=int)
        for is_inside, moves in zip(inside, moved, strict=True):
            agrees += is_inside[:, None] == moves[None, :]
        return np.asarray((agrees == len(rows)).sum(0))

    def _seen(self, knowledge: Knowledge) -> Array:
        """Return how many public samples have each feature, (features,)."""
        inputs = knowledge.inputs
        if self.words:
            seen = np.zeros(self.count)
            for sample in inputs.reshape(len(inputs), -1):
                seen[np.unique(sample.astype(int))] += 1
            return seen
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
        scale = self._value(feature, knowledge)
        moves = values / (float(knowledge.config["lr"]) * steps * scale)
        prediction = mean_prediction(knowledge)
        best = (math.inf, normalised(moves))
        for records in range(1, MOST_RECORDS + 1):
            counts = moves + records * prediction
            if counts.min() < -EXCESS:
                continue
            whole = np.rint(np.clip(counts, 0, None))
            error = float(np.abs(counts - whole).sum())
            if whole.sum() == records and error < best[0]:
                best = (error, whole)
        return best[1]

    def _value(self, feature: int, knowledge: Knowledge) -> float:
        """Return the value that a record with a feature has: 1, unless public samples tell."""
        if knowledge.samples is None:
            return 1.0
        column = knowledge.inputs.reshape(len(knowledge.inputs), -1)[:, feature]
        present = column[column != 0]
        return float(np.median(present)) if len(present) else 1.0


def _rows_of_blocks(view: View, knowledge: Knowledge) -> Iterator[_Row]:
    """Yield the blocks that somebody filled, of sums and then of averages that clients are sent."""
    for field in BLOCK_FIELDS:
        for row in _summed(view, field):
            if row.values.any():
                yield row
    undo = _undoing(knowledge)
    if knowledge.mask != "none" and undo is None:
        return
    for number, colluder in knowledge.colluders.items():
        yield from _averaged(view, number, colluder, undo)


def _summed(view: View, field: str) -> Iterator[_Row]:
    """Yield the blocks of a field of sums."""
    groups: dict[tuple[int, str], int] = {}
    for observed in observed_sums(view, field):
        blocks = as_array(observed.row)
        if blocks.ndim != MATRIX:
            continue
        group = groups.setdefault((observed.step, field), 0)
        groups[observed.step, field] += 1
        for block, values in enumerate(blocks):
            yield _Row(observed.step, field, group, block, observed.round, observed.members, values)


def _rows_of_updates(view: View, knowledge: Knowledge) -> Iterator[_Row]:
    """Yield the sums of updates, block by block, without their mask."""
    undo = _undoing(knowledge)
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
                yield _Row(
                    observed.step, field, group, block, observed.round, observed.members, values
                )


def _averaged(view: View, number: int, colluder: Colluder, undo: _Undo | None) -> Iterator[_Row]:
    """Yield what the averages that a client was sent tell of blocks of others.

    Args:
        view: what the adversary observed.
        number: of the client.
        colluder: the client.
        undo: undoes the mask; None where there is none.
    """
    moved: dict[int, Array] = {}
    for message in view.messages():
        content = message.content
        means = getattr(content, "means", None)
        steps = getattr(content, "steps", None)
        if means is None or steps is None or message.receiver.index != number:
            continue
        for position in means.picks[0]:
            step = int(steps.table[position])
            rows = means.table[position]
            blocks = list(range(len(rows)))
            if rows.ndim != MATRIX:
                models = getattr(content, "models", None)
                if models is None:
                    continue
                rows, blocks = rows[None], [int(models.table[position])]
            if undo is not None:
                rows = undo(rows, step)
            for block, values in zip(blocks, as_array(rows), strict=True):
                before = moved.get(block, np.zeros_like(values))
                # a displacement since θ_0 is the sum of the averages so far
                average = values - before if content.absolute else values
                moved[block] = before + average
                if average.any():
                    other = _without_own(average, colluder, step, block)
                    yield _Row(step, BLOCKS, -1, block, 0, frozenset(), other)


def _without_own(average: Array, colluder: Colluder, step: int, block: int) -> Array:
    """Return an average without the client's own row, as if one other client were in the block."""
    for (_, number), reply in colluder.replies.items():
        rows = getattr(reply, BLOCKS, None)
        if number == step and isinstance(rows, Rows):
            own = as_array(rows.values[0])[block]
            if own.any():
                return np.asarray(TWO * average - own)
    return average


class _Undo:
    """Undoes a run's mask by the seed of a client.

    Args:
        knowledge: with the mask, and the client.
        seed: that clients share.
    """

    def __init__(self, knowledge: Knowledge, seed: bytes) -> None:
        (self._stage,) = masks.build(knowledge.mask, knowledge.dimension)
        self._stage.unlock(seed)  # type: ignore[attr-defined]
        self._dimension = knowledge.dimension

    def __call__(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (n, d) of masked ones.

        Args:
            rows: (n, width).
            step: number of the call.
        """
        return self._stage.inverse(rows, step)[:, : self._dimension]


def _undoing(knowledge: Knowledge) -> _Undo | None:
    """Return what undoes the mask of a run; None where nobody gives a seed, or there is none."""
    if knowledge.mask == "none":
        return None
    for number, colluder in knowledge.colluders.items():
        seed = colluder.secrets.seed.get(number)
        if seed is not None:
            return _Undo(knowledge, seed)
    return None


def _mean_sizes(view: View) -> dict[int, float]:
    """Return by call the mean number of samples of a client, where these are summed."""
    sizes = {}
    for observed in observed_sums(view, "size"):
        sizes[observed.step] = float(observed.row.sum()) / max(1, len(observed.members))
    return sizes


def _errors(guess: Guess, truth: Truth, draw: np.random.Generator | None = None) -> Array:
    """Return the relative error of each guess to the nearest row of a member, (n,).

    Args:
        guess: the attack's.
        truth: of the run, with taps.
        draw: of rows that others moved, as many as members did; None compares with the members'.
    """
    rows = _TrueRows(truth, guess)
    errors = []
    for subject in guess.values:
        candidates = list(rows.owners(subject).values())
        if draw is not None:
            strangers = rows.strangers(subject)
            count = min(len(candidates), len(strangers))
            chosen = draw.choice(len(strangers), count, replace=False) if count else []
            candidates = [strangers[k] for k in chosen]
        errors.append(rows.error(subject, candidates))
    return np.asarray(errors)


def _error(read: Array, true: Array, scaled: bool) -> float:
    """Return the relative error of a row that was read as another one.

    Args:
        read: (width,), or wider by a mask's padding.
        true: (d,).
        scaled: True to compare up to a positive scale.
    """
    padded = np.zeros_like(read)
    padded[: len(true)] = true[: len(read)]
    length = float(np.linalg.norm(padded))
    if not length:
        return 1.0
    scale = 1.0
    if scaled:
        inner = float(read @ padded)
        if inner <= 0:
            return 1.0
        scale = length**2 / inner
    return float(np.linalg.norm(scale * read - padded)) / length


def _misplaced(counts: Array, labels: Array) -> float:
    """Return the share of labels that counts misplace."""
    true = np.bincount(labels.astype(int), minlength=len(counts)).astype(float)
    shares = true / max(1.0, true.sum())
    return float(np.abs(normalised(counts) - shares).sum()) / 2


def _has_feature(inputs: Array, feature: int) -> Any:
    """Return which records have a feature, (n,)."""
    return inputs.reshape(len(inputs), -1)[:, feature] != 0
