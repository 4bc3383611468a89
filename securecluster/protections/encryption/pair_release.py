"""What the key authority tells of R: labels alone, or R on a grid; and how pairs are packed.

Clients round their numbers before they encrypt them. So the sum that is decrypted is one of
integers, and R exact: a number of two clients, in half steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.privacy.fixed_point import FixedPoint
from securecluster.protections.encryption.packing import FieldShape, Layout
from securecluster.protections.encryption.parameters import MOST_MEMBERS, Parameters
from securecluster.protections.pair_rows import PAIR, PairRange
from securecluster.runtime.pair_aggregators import PairFunctions

# bits after the point to which clients round the numbers of pairs: R is in steps of half of that
PAIR_BITS = 14


class PairRelease:
    """Release of R by the key authority.

    Args:
        ranges: range of each field of rows.
        functions: functions of R.
        labelled: names of the functions of which labels alone are released.
    """

    def __init__(
        self,
        ranges: Mapping[str, PairRange],
        functions: PairFunctions,
        labelled: Sequence[str] = (),
    ) -> None:
        self._ranges = ranges
        self._functions = functions
        self._labelled = tuple(labelled)

    def check(self, then: str) -> None:
        """Raise an error for a function of which more than labels would be told.

        Security rule: where labels are released, R is not, whatever the server calls its function.

        Args:
            then: name of the function of R.

        Raises:
            PolicyError: labels of other functions alone are released.
        """
        if self._labelled and then not in self._labelled:
            raise PolicyError(
                f"the key authority tells labels by {', '.join(self._labelled)} alone, and the "
                f"server asks for {then[:40]!r} of R: the sum is refused"
            )

    def largest(self, name: str) -> int:
        """Return the largest magnitude of one client's integer.

        Args:
            name: name of the field.
        """
        return rounding(name, self._ranges[name]).largest

    def layout(self, text: str, bits: Mapping[str, int], clients: int) -> Layout:
        """Return the layout of a text, which must be that of the pairs of some clients.

        Args:
            text: text that the server has sent.
            bits: 32 or 64, by field.
            clients: number of clients.

        Raises:
            FrameError: another layout.
        """
        layout = Layout.parse(text, bits)
        (name,) = bits
        if layout != pair_layout(name, self._ranges[name], clients):
            raise FrameError("the sum of pairs has another length than its clients have pairs")
        return layout

    def relevance(
        self, name: str, sums: NDArray[np.int64], group: Sequence[int], survivors: Sequence[int]
    ) -> torch.Tensor:
        """Return R of the pairs i < j, (r, r) in float64; its other entries are zero.

        Args:
            name: name of the field.
            sums: sums of integers of each pair of the group.
            group: the clients that rows have numbers of, ascending.
            survivors: the r clients whose rows are in the sum, ascending.
        """
        integers = torch.from_numpy(_among(sums, group, survivors))
        return _decoded(integers, name, self._ranges[name])

    def numbers(
        self,
        name: str,
        sums: NDArray[np.int64],
        group: Sequence[int],
        survivors: Sequence[int],
        then: str,
    ) -> torch.Tensor:
        """Return the numbers that leave the authority, (n,) int64.

        They follow from sums of integers, and so show nothing of the noise of the ciphertexts.

        Args:
            name: name of the field.
            sums: sums of integers of each pair of the group.
            group: the clients that rows have numbers of, ascending.
            survivors: the clients whose rows are in the sum, ascending.
            then: name of the function of R.

        Raises:
            FrameError: a sum that no two clients can have.
        """
        pair_range = self._ranges[name]
        upper = np.triu_indices(len(survivors), 1)
        numbers = torch.from_numpy(_among(sums, group, survivors)[upper])
        if not _in_range(_decoded(numbers, name, pair_range), name, pair_range):
            raise FrameError(
                f"{name}: a pair of clients has a sum beyond its range: a row was forged, or it is "
                "under another key"
            )
        if then not in self._labelled:
            return numbers
        relevance = from_grid(numbers, len(survivors), name, pair_range)
        labels = self._functions.apply(then, relevance).labels
        return torch.tensor(labels, dtype=torch.int64)


def rounding(name: str, pair_range: PairRange) -> FixedPoint:
    """Return the encoding of the numbers of pairs that clients encrypt.

    Args:
        name: name of the field of rows.
        pair_range: its range.

    Raises:
        UsageError: a range whose integers are beyond those that sums under CKKS give exactly.
    """
    largest = math.ceil(math.ldexp(pair_range.bound, PAIR_BITS))
    # What pairs of the largest sum leave room for; integers of 64 bits are summed in limbs.
    exact = Parameters().largest_integer(pair_range.bits, MOST_MEMBERS)
    if exact is not None and largest > exact:
        raise UsageError(
            f"{name} is in a range up to {pair_range.bound:g}, and encrypted pairs sum numbers of "
            f"32 bits up to {math.ldexp(exact, -PAIR_BITS):g} exactly: give it 64 bits in "
            "the fields of your PairOptions, or take relevance pads"
        )
    return pair_range.fixed_point(name, largest)


def pair_layout(name: str, pair_range: PairRange, clients: int) -> Layout:
    """Return the layout of the pairs of some clients.

    Args:
        name: name of the field of rows.
        pair_range: its range.
        clients: number of clients.
    """
    return Layout((FieldShape(name, pair_range.bits, (clients * (clients - 1) // 2,)),))


def own_pairs(row: NDArray[Any], position: int) -> NDArray[Any]:
    """Return a client's part of all pairs i < j: its row where it is in the pair, else zeros.

    Args:
        row: numbers of the pairs with each client (m,).
        position: position of the client itself, whose number is left out.
    """
    square = np.zeros((len(row), len(row)), row.dtype)
    square[position, position + 1 :] = row[position + 1 :]
    square[:position, position] = row[:position]
    return square[np.triu_indices(len(row), 1)]


def from_grid(
    numbers: torch.Tensor, clients: int, name: str, pair_range: PairRange
) -> torch.Tensor:
    """Return R (r, r) in float64, of sums of integers of the pairs i < j.

    Args:
        numbers: sum of the integers of each pair, int64.
        clients: number of clients, r.
        name: name of the field of rows.
        pair_range: range of R.

    Raises:
        FrameError: another number of pairs, or a number that R cannot have.
    """
    if len(numbers) != clients * (clients - 1) // 2:
        raise FrameError("the key authority released another number of pairs than there are")
    relevance = torch.zeros(clients, clients, dtype=torch.float64)
    upper = torch.triu_indices(clients, clients, 1)
    values = _decoded(numbers, name, pair_range)
    if not _in_range(values, name, pair_range):
        raise FrameError("the key authority released pairs beyond their range")
    relevance[upper[0], upper[1]] = values
    relevance = relevance + relevance.T
    relevance.fill_diagonal_(pair_range.itself)
    return relevance


def _among(
    sums: NDArray[np.int64], group: Sequence[int], survivors: Sequence[int]
) -> NDArray[np.int64]:
    """Return the sums of pairs of survivors, (r, r), above the diagonal."""
    size = len(group)
    square = np.zeros((size, size), np.int64)
    square[np.triu_indices(size, 1)] = sums
    places = np.searchsorted(group, survivors)
    return square[np.ix_(places, places)]


def _decoded(integers: torch.Tensor, name: str, pair_range: PairRange) -> torch.Tensor:
    """Return R_ij in float64 of sums of two integers, exactly."""
    exponent = rounding(name, pair_range).exponent
    return integers.double() * math.ldexp(1.0, -exponent) / PAIR


def _in_range(values: torch.Tensor, name: str, pair_range: PairRange) -> bool:
    """Return whether clients within the range can have values of R_ij."""
    error = rounding(name, pair_range).error_bound(PAIR) / PAIR
    low = pair_range.low - error
    high = pair_range.high + error
    return bool(((low <= values) & (values <= high)).all())
