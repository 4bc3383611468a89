"""What the key authority tells of R: labels alone, or R on a grid; and how pairs are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.privacy.homomorphic.packing import FieldShape, Layout
from securecluster.privacy.secure_sum.pair_pads import PAIR
from securecluster.runtime.pad_client import PairRange
from securecluster.runtime.pair_aggregators import PairFunctions

# what the key authority tells
LABELS = "labels"
MATRIX = "matrix"
RELEASES = (LABELS, MATRIX)
# step of the grid on which R leaves the key authority: full precision would give its key away
STEP = 1e-4


class PairRelease:
    """What the key authority tells of R.

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

    def largest(self, name: str) -> int:
        """Return the largest magnitude of one client's integer.

        Args:
            name: name of the field.
        """
        return self._ranges[name].fixed_point(name).largest

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
        self,
        name: str,
        sums: NDArray[np.int64],
        group: Sequence[int],
        survivors: Sequence[int],
    ) -> torch.Tensor:
        """Return R of the pairs i < j, (r, r) in float64; its other entries are zero.

        Args:
            name: name of the field.
            sums: sums of integers of each pair of the group.
            group: the clients that rows have numbers of, ascending.
            survivors: the r clients whose rows are in the sum, ascending.
        """
        size = len(group)
        square = np.zeros((size, size), np.int64)
        square[np.triu_indices(size, 1)] = sums
        places = [list(group).index(client) for client in survivors]
        kept = torch.from_numpy(square[np.ix_(places, places)])
        codec = self._ranges[name].fixed_point(name)
        decoded: torch.Tensor = codec.decode(kept.to(codec.dtype), PAIR, torch.float64)
        return decoded / 2

    def numbers(
        self,
        name: str,
        sums: NDArray[np.int64],
        group: Sequence[int],
        survivors: Sequence[int],
        then: str,
    ) -> torch.Tensor:
        """Return the numbers that leave the authority, (n,) int64.

        Security rule: R is rounded before anything is computed from it, so that no number depends
        on the noise of the ciphertexts but by the step that it is rounded to.

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
        values = self.relevance(name, sums, group, survivors).numpy()[upper]
        error = pair_range.error_bound() + STEP
        if not np.all((pair_range.low - error <= values) & (values <= pair_range.high + error)):
            raise FrameError(
                f"{name}: a pair of clients has a sum beyond its range: a row was forged, or it is "
                "under another key"
            )
        numbers = torch.from_numpy(np.rint(values / STEP).astype(np.int64))
        if then not in self._labelled:
            return numbers
        rounded = from_grid(numbers, len(survivors), pair_range)
        labels = self._functions.apply(then, rounded).labels
        return torch.tensor(labels, dtype=torch.int64)


def pair_layout(name: str, pair_range: PairRange, clients: int) -> Layout:
    """Return the layout of the pairs of some clients.

    Args:
        name: name of the field of rows.
        pair_range: its range.
        clients: number of clients.
    """
    return Layout((FieldShape(name, pair_range.bits, (clients * (clients - 1) // 2,)),))


def own_pairs(row: NDArray[Any], own: int) -> NDArray[Any]:
    """Return a client's part of all pairs i < j: its row where it is in the pair, else zeros.

    Args:
        row: numbers of the pairs with each client (m,).
        own: position of the client itself, whose number is left out.
    """
    square = np.zeros((len(row), len(row)), row.dtype)
    square[own, own + 1 :] = row[own + 1 :]
    square[:own, own] = row[:own]
    return square[np.triu_indices(len(row), 1)]


def from_grid(numbers: torch.Tensor, clients: int, pair_range: PairRange) -> torch.Tensor:
    """Return R (r, r) in float64, of the pairs i < j in steps of the grid.

    Args:
        numbers: steps of each pair.
        clients: number of clients, r.
        pair_range: range of R.

    Raises:
        FrameError: another number of pairs, or a number that R cannot have.
    """
    if len(numbers) != clients * (clients - 1) // 2:
        raise FrameError("the key authority released another number of pairs than there are")
    relevance = torch.zeros(clients, clients, dtype=torch.float64)
    upper = torch.triu_indices(clients, clients, 1)
    values = numbers.double() * STEP
    relevance[upper[0], upper[1]] = values
    relevance = relevance + relevance.T
    relevance.fill_diagonal_(pair_range.itself)
    if len(values):
        error = pair_range.error_bound() + 2 * STEP
        low, high = torch.aminmax(values)
        if float(low) < pair_range.low - error or float(high) > pair_range.high + error:
            raise FrameError("the key authority released pairs beyond their range")
    return relevance
