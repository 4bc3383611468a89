"""Packing of the integers of a reply into the slots of ciphertexts, and of sums out of them.

A ciphertext costs the same whether it holds one number or all it has slots for, so all fields of a
reply go into one row of slots. The first slot of each ciphertext counts contributors: after
decryption it must be the number of clients that the sum is said to be over.

A field of 32 bits takes a slot a number. One of 64 bits takes four, for limbs of 16 bits, whose
sums over up to 4096 clients are small.

Sums of integers come out exactly. CKKS computes with real numbers and errs a little, so its
integers are so few (`Parameters.grid_bits`) that the nearest one is the sum. A decryption that lies
further than a quarter of a step from an integer is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import FrameError
from securecluster.protections.encryption.parameters import LIMB_BITS, Parameters, check_members

LIMBS = 4
LIMB_MASK = (1 << LIMB_BITS) - 1
# largest distance of a decrypted number from an integer
INTEGER_ERROR = 0.25
# largest decrypted number of an unused slot, and distance of the count from an integer
SLOT_ERROR = 1e-4
# numbers of one reply
MOST_NUMBERS = 1 << 32
LONGEST_LAYOUT = 4096
_FIELD = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63}):(32|64):((?:\d{1,10}(?:x\d{1,10}){0,7})?)")


@dataclass(frozen=True)
class FieldShape:
    """Form of one field of a reply.

    Args:
        name: name of the field.
        bits: 32 or 64, of its integers.
        shape: shape of one client's row.
    """

    name: str
    bits: int
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """Return how many integers a row has."""
        return math.prod(self.shape)

    @property
    def slots(self) -> int:
        """Return how many slots a row takes."""
        if self.bits == 32:
            return self.numbers
        return LIMBS * self.numbers


@dataclass(frozen=True)
class Layout:
    """Fields of one reply, in the order in which they are packed."""

    fields: tuple[FieldShape, ...]

    def __str__(self) -> str:
        """Return the layout as text, such as "delta:32:2410;size:64:"."""
        texts = []
        for field in self.fields:
            shape = "x".join(map(str, field.shape))
            texts.append(f"{field.name}:{field.bits}:{shape}")
        return ";".join(texts)

    @classmethod
    def parse(cls, text: str, bits: Mapping[str, int]) -> Layout:
        """Return the layout of a text; inverse of `str(layout)`.

        Args:
            text: text that another party has sent.
            bits: 32 or 64, by the name of each field that a reply may have.

        Raises:
            FrameError: another text than `str` returns, or fields that the reply does not have.
        """
        fields: list[FieldShape] = []
        entries = text.split(";") if text and len(text) <= LONGEST_LAYOUT else []
        for entry in entries:
            match = _FIELD.fullmatch(entry)
            if match is None or bits.get(match[1]) != int(match[2]):
                raise _bad_layout()
            sizes = match[3].split("x") if match[3] else []
            fields.append(FieldShape(match[1], int(match[2]), tuple(map(int, sizes))))
        layout = cls(tuple(fields))
        names = [field.name for field in fields]
        if not fields or len(set(names)) < len(names) or layout.slots > MOST_NUMBERS:
            raise _bad_layout()
        if str(layout) != text:
            raise _bad_layout()
        return layout

    @property
    def slots(self) -> int:
        """Return how many slots the fields take."""
        return sum(field.slots for field in self.fields)

    def ciphertexts(self, parameters: Parameters) -> int:
        """Return how many ciphertexts a reply takes.

        Args:
            parameters: of the encryption.
        """
        return max(1, math.ceil(self.slots / (parameters.slots - 1)))


def _bad_layout() -> FrameError:
    return FrameError("a frame of encrypted rows describes no fields of this call: it is refused")


def pack(
    rows: Mapping[str, NDArray[Any]],
    layout: Layout,
    largest: Mapping[str, int],
    parameters: Parameters,
) -> list[NDArray[Any]]:
    """Return the slots of each ciphertext of a reply.

    Args:
        rows: integers of each field, by name, in any shape.
        layout: the fields.
        largest: largest magnitude of an integer, by field, within
            `Parameters.largest_integer`.
        parameters: of the encryption.
    """
    pieces: list[NDArray[Any]] = []
    for field in layout.fields:
        integers = rows[field.name].reshape(-1).astype(np.int64)
        if field.bits == 64:
            integers = _limbs(integers).reshape(-1)
        pieces.append(integers / _unit(field, largest))
    width = parameters.slots - 1
    count = layout.ciphertexts(parameters)
    packed = np.zeros((count, width), dtype=pieces[0].dtype)
    packed.reshape(-1)[: layout.slots] = np.concatenate(pieces)
    contributors = np.ones((count, 1), dtype=packed.dtype)
    return list(np.concatenate([contributors, packed], axis=1))


def unpack(
    slots: Sequence[NDArray[Any]],
    layout: Layout,
    largest: Mapping[str, int],
    parameters: Parameters,
    members: int,
) -> dict[str, NDArray[np.int64]]:
    """Return the sums of integers in decrypted slots, after checks of their ranges.

    Args:
        slots: numbers of each ciphertext.
        layout: the fields.
        largest: largest magnitude of one client's integer, by field.
        parameters: of the encryption.
        members: number of clients that the sum is said to be over.

    Raises:
        FrameError: a number of ciphertexts that the layout does not have, or numbers that no sum
            over these clients has, as under a wrong key.
    """
    check_members(members)
    if len(slots) != layout.ciphertexts(parameters):
        raise FrameError(
            f"a sum came in {len(slots)} ciphertexts instead of {layout.ciphertexts(parameters)}"
        )
    table = np.stack(slots)
    counts = table[:, 0]
    flat = table[:, 1:].reshape(-1)
    # A comparison with NaN is false, so these are written to fail on it.
    if not np.all(np.abs(counts - members) <= SLOT_ERROR):
        raise FrameError(
            f"the decrypted number of contributors is not {members}: another key, altered "
            "ciphertexts, or a sum over other clients than it is said to be"
        )
    if not np.all(np.abs(flat[layout.slots :]) <= SLOT_ERROR):
        raise _out_of_range("an unused slot")
    sums = {}
    first = 0
    for field in layout.fields:
        piece = flat[first : first + field.slots]
        first += field.slots
        sums[field.name] = _sum_of(field, piece, largest, members).reshape(field.shape)
    return sums


def _sum_of(
    field: FieldShape, slots: NDArray[Any], largest: Mapping[str, int], members: int
) -> NDArray[np.int64]:
    """Return the sum of one field, after checks of its range."""
    unit = _unit(field, largest)
    # what one client's slot is at most, in slots' own integers
    limit = largest[field.name]
    if field.bits == 64:
        limit = LIMB_MASK
    integers = _nearest_integers(slots * unit, field.name)
    if not np.all(np.abs(integers) <= members * limit):
        raise _out_of_range(field.name)
    if field.bits == 32:
        return integers
    return _joined(integers.reshape(-1, LIMBS), field.name)


def _nearest_integers(numbers: NDArray[Any], name: str) -> NDArray[np.int64]:
    """Return numbers that are nearly integers as integers.

    Security rule: the noise of CKKS gives the secret key away. The sum of integers shows none of
    it, as long as no decryption errs by half a step, so one that errs by a quarter is not released.
    """
    # Comparisons with NaN are false, and infinity is refused before it is subtracted.
    if not np.all(np.abs(numbers) < 2.0**53):
        raise _out_of_range(name)
    integers: NDArray[np.float64] = np.rint(numbers)
    if not np.all(np.abs(numbers - integers) <= INTEGER_ERROR):
        raise FrameError(
            f"{name} of a decrypted sum lies between two integers, so nothing is released: another "
            "key, altered ciphertexts, or a client that encrypted no integers"
        )
    return integers.astype(np.int64)


def _unit(field: FieldShape, largest: Mapping[str, int]) -> float:
    """Return the integer that CKKS holds as 1."""
    if field.bits == 64:
        return float(1 << LIMB_BITS)
    return float(largest[field.name])


def _limbs(integers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return limbs (n, 4) of integers (n,): three without sign, and the last one with it."""
    limbs = [(integers >> (LIMB_BITS * k)) & LIMB_MASK for k in range(LIMBS - 1)]
    limbs.append(integers >> (LIMB_BITS * (LIMBS - 1)))
    return np.stack(limbs, axis=1)


def _joined(limbs: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Return the integers (n,) of sums of limbs (n, 4)."""
    # Python's integers: sums of the highest limbs may leave 64 bits where others bring them back.
    joined = [
        sum(int(limb) << (LIMB_BITS * k) for k, limb in enumerate(row)) for row in limbs.tolist()
    ]
    if any(abs(number) >= 1 << 63 for number in joined):
        raise _out_of_range(name)
    return np.array(joined, dtype=np.int64)


def _out_of_range(name: str) -> FrameError:
    return FrameError(
        f"{name} of a decrypted sum is beyond its range: another key, altered ciphertexts, or a "
        "sum over other clients than it is said to be"
    )
