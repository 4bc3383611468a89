"""What hidden sums show of members that are alone: rows that were read, and the true ones.

A secure sum hides a summand behind the others, as far as the others add anything. A block that one
member fills, such as that of a cluster, a cell or a class, is that member's row. A coordinate that
one member moves, such as the column of a category or the row of a word in the first layer, is its
own number (Suimon et al. 2025, Per-element Secure Aggregation, arXiv 2508.04285). Nobody lies for
it, and no list of members tells of it.

Scores count rows that were read to within a thousandth. One is enough: chance reads none, and
nothing is estimated from a sample.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import Guess, Knowledge, Scorer, Truth
from securecluster.core.lazy_torch import torch
from securecluster.privacy.masking import masks

SOURCE = "Suimon et al. 2025, Per-element Secure Aggregation, arXiv 2508.04285"
TOLERANCE = 1e-3  # relative error of a row that counts as read
# details of guesses
MEMBERS = "members"  # by subject, the clients whose row it may be
SCALED = "scaled"  # True if rows are read up to their scale
COLUMNS = "columns"  # by feature, the coordinates of its weights

# call, field, number of the sum in the call (-1 of averages), block, feature (-1 of whole blocks)
Subject = tuple[int, str, int, int, int]


@dataclass(frozen=True)
class ReadRow:
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


class TrueRows:
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
        self._columns: Mapping[int, Sequence[int]] = guess.details.get(COLUMNS, {})

    def owners(self, subject: Subject) -> dict[int, Array]:
        """Return by client what members of a sum moved of what was read.

        Args:
            subject: of the guess.
        """
        step, field, _, block, feature = subject
        members = self._guess.details[MEMBERS][subject]
        displacements = {}
        for client, blocks in self._rows.get((step, field), {}).items():
            row = self._part(blocks[block], feature)
            if client in members and row.any():
                displacements[client] = row
        return displacements

    def strangers(self, subject: Subject) -> list[Array]:
        """Return what others moved in the place of what was read, or in other blocks.

        Args:
            subject: of the guess.
        """
        step, field, _, _, feature = subject
        owners = self.owners(subject)
        rows = []
        for client, blocks in self._rows.get((step, field), {}).items():
            if client not in owners:
                rows += [self._part(row, feature) for row in blocks if row.any()]
        return rows

    def measured(self, subject: Subject) -> Measured:
        """Return the errors of what was read.

        Args:
            subject: of the guess.
        """
        read = self._guess.values[subject]
        scaled = self._guess.details[SCALED]

        def errors(rows: Iterable[Array]) -> Array:
            return np.asarray([_relative_error(read, row, scaled) for row in rows])

        owners = self.owners(subject)
        others = errors(self.strangers(subject))
        return Measured(errors(owners.values()), others, tuple(owners))

    def _part(self, row: Array, feature: int) -> Array:
        if feature < 0:
            return row
        return np.asarray(row[list(self._columns[feature])])


@dataclass(frozen=True)
class Measured:
    """Relative errors of what was read.

    Args:
        own: to what members moved there.
        others: to what others moved there, or in other blocks.
        owners: the members.
    """

    own: Array
    others: Array
    owners: tuple[int, ...]

    @property
    def read(self) -> bool:
        """Return whether it is one member's to within a thousandth."""
        return bool((self.own < TOLERANCE).any())

    def read_of_others(self, draw: np.random.Generator) -> bool:
        """Return the same of others, as many as members.

        Args:
            draw: source of the others.
        """
        count = min(len(self.own), len(self.others))
        chosen = draw.choice(self.others, count, replace=False)
        return bool((chosen < TOLERANCE).any())


class OfTrueRows(Scorer):
    """Base class of scorers that compare what was read with the rows of members."""

    # errors are the same for every shuffle of a guess
    _known: tuple[weakref.ref[Guess], dict[Subject, Measured]] | None = None

    def measured(self, guess: Guess, truth: Truth) -> dict[Subject, Measured]:
        """Return the errors of a guess by subject.

        Args:
            guess: the attack's.
            truth: of the run, with taps.
        """
        if self._known is None or self._known[0]() is not guess:
            rows = TrueRows(truth, guess)
            errors = {subject: rows.measured(subject) for subject in guess.values}
            self._known = (weakref.ref(guess), errors)
        return self._known[1]


class RowsRead(OfTrueRows):
    """Number of rows that one client's row was read from, to within a thousandth."""

    counted: ClassVar[bool] = True

    def __init__(self, what: str) -> None:
        self.metric = f"{what} read to within 0.1 % of one client's own numbers"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each row that is one member's, and 0 for each other one, (n,).

        Args:
            guess: the attack's.
            truth: of the run, with taps.
        """
        errors = self.measured(guess, truth).values()
        return np.asarray([error.read for error in errors], dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for rows of clients that did not move what was read.

        Args:
            guess: the attack's.
            truth: of the run, with taps.
            draw: source of the rows.
        """
        errors = self.measured(guess, truth).values()
        return np.asarray([error.read_of_others(draw) for error in errors], dtype=float)

    def summary(self, units: Array) -> float:
        """Return the number of rows that were read.

        Args:
            units: (n,).
        """
        return float(np.sum(units))


class Undo:
    """Inverse of a run's mask, by the seed of a client.

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


def undoing(knowledge: Knowledge) -> Undo | None:
    """Return what undoes the mask of a run; None where nobody gives a seed, or there is none.

    Args:
        knowledge: with the mask and the colluding clients.
    """
    if knowledge.mask == "none":
        return None
    for number, colluder in knowledge.colluders.items():
        seed = colluder.secrets.seed.get(number)
        if seed is not None:
            return Undo(knowledge, seed)
    return None


def _relative_error(read: Array, true: Array, scaled: bool) -> float:
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
