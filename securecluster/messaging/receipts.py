"""Receipts: what a client's reply released of its data, written where the noise was added.

A receipt comes with the reply and is of one client. A private field that no receipt names is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

GAUSSIAN = "gaussian"
TRAINING = "dp-sgd"
FOLLOWS = "follows"
PUBLIC = "public"
COSTLESS = (FOLLOWS, PUBLIC)
MECHANISMS = (GAUSSIAN, TRAINING, *COSTLESS)
# of one reply: a longer list is refused before it is read
MOST = 64


@dataclass(frozen=True)
class Receipt:
    """One release of one client, and the fields of its reply that follow from it.

    Args:
        mechanism: "gaussian"; "dp-sgd" of a local training; "follows" of what earlier trainings of
            this kind tell; or "public" of numbers that the relation of neighbours keeps, such as
            numbers of samples.
        fields: names of the fields that follow from it, in the order of the reply. The first one
            pays for Gaussian noise.
        multiplier: z, the noise's standard deviation over the sensitivity to blanking the unit of
            privacy; of another mechanism, that of Gaussian noise that is at most as private. 0
            where nothing was drawn.
        replace: sensitivity to replacing the unit over that to blanking it.
        batch: expected samples in a step of "dp-sgd"; from the client's number on, all of them.
        epochs: epochs of "dp-sgd".
        once: name and digest of a release that a client repeats to the bit however often it is
            asked, so that it is paid for once in a run; empty for one that is new in every call.
            The digest is of numbers with noise, so it tells nothing more.
    """

    mechanism: str
    fields: tuple[str, ...] = ()
    multiplier: float = 0.0
    replace: float = 2.0
    batch: int = 0
    epochs: int = 1
    once: str = ""

    def as_json(self) -> list[Any]:
        """Return what a frame has of the receipt: values without the defaults at their end."""
        values: list[Any] = [getattr(self, field.name) for field in fields(self)]
        values[1] = list(self.fields)
        while values[-1] == _DEFAULTS[len(values) - 1]:
            values.pop()
        return values

    @classmethod
    def from_json(cls, values: Any) -> Receipt:
        """Return the receipt that `as_json` made the values of.

        Args:
            values: of a frame, which anybody may have written.

        Raises:
            ValueError: they are those of no receipt.
        """
        if not isinstance(values, list) or not 1 <= len(values) <= len(_DEFAULTS):
            raise ValueError("a receipt has other values")
        complete = [*values, *_DEFAULTS[len(values) :]]
        for value, default in zip(complete, _DEFAULTS, strict=True):
            # the exact type: a JSON true would pass as an integer
            if type(value) is not type(default):
                raise ValueError("a receipt has values of other types")
        mechanism, names, *optional_values = complete
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError("a receipt names no fields, or one of them twice")
        receipt = cls(mechanism, tuple(names), *optional_values)
        receipt._check()
        # one text for each receipt
        if receipt.as_json() != values:
            raise ValueError("a receipt has values that go without saying")
        return receipt

    def _check(self) -> None:
        """Raise ValueError for values that no mechanism has."""
        costs = self.mechanism not in COSTLESS
        if self.mechanism not in MECHANISMS or costs != (self.multiplier > 0):
            raise ValueError("a receipt is of no mechanism with noise")
        if not math.isfinite(self.multiplier) or not 1 <= self.replace <= 2:
            raise ValueError("a receipt's noise is out of range")
        if not 0 <= self.batch < 1 << 63 or not 1 <= self.epochs < 1 << 31:
            raise ValueError("a receipt's training is out of range")


# in the order of the fields; the first has none
_DEFAULTS: list[Any] = ["", [], 0.0, 2.0, 0, 1, ""]

# of one client's reply
Receipts = tuple[Receipt, ...]


@lru_cache(maxsize=1024)
def receipts_as_json(receipts: Receipts) -> list[Any]:
    """Return what a frame has of a reply's receipts; those of many clients are mostly the same.

    Args:
        receipts: of one client.
    """
    return [receipt.as_json() for receipt in receipts]


def receipts_from_json(values: Any) -> Receipts:
    """Return the receipts of a frame.

    Args:
        values: of the frame.

    Raises:
        ValueError: they are those of no receipts.
    """
    if not isinstance(values, list) or not 1 <= len(values) <= MOST:
        raise ValueError("its receipts are not a list of some")
    return tuple(Receipt.from_json(value) for value in values)
