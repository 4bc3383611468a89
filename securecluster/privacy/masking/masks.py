"""Masks: orthonormal maps that all clients of a run share and the server does not know.

A mask is obfuscation, not encryption: it protects against the server only, one client that tells
    the server the shared seed undoes
it, and every orthonormal map leaves norms and inner products as they were, by which clients can
also be linked from call to call.

A permutation hides which label is which, and not a client's label distribution: coordinates of one
call are columns over clients, and grouping columns that move alike gives the distributions back
(`benchmarks.label_attack`, whose numbers stand in `LABELS`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import unknown
from securecluster.privacy.masking.keystream import SIGNS, Keyed, blocks, order, signs
from securecluster.privacy.masking.rotations import Haar, Rotation, check_dense
from securecluster.privacy.pipeline import Pipeline, Stage

MASKS = ("none", "permutation", "signed-permutation", "rotation", "haar")
# masks that keep each number's size, hence L1 and every norm of coordinates
ENTRYWISE = (
    "none",
    "permutation",
    "signed-permutation",
)
_SEED = (
    "falls when one client tells the server the shared seed; clients can be linked from call to "
    "call by their inner products"
)

# correlation with true label shares, of Dirichlet(0.3) and of two labels a client, as
# benchmarks.label_attack found it
LABELS = {
    "permutation": (0.88, 0.99),
    "signed-permutation": (0.86, 0.97),
    "rotation": (0.64, 0.71),
}


def _labels_told(name: str, hidden: str) -> str:
    """Return what a mask leaves of label distributions.

    Args:
        name: of the mask.
        hidden: what of them it hides.
    """
    skewed, two = LABELS[name]
    return (
        f"{hidden}: from the updates of 40 clients in one round their label distributions were "
        f"read, up to the labels' names, with a correlation of {skewed} and {two} (chance 0.3; "
        "python -m securecluster.benchmarks.label_attack)"
    )


_SHUFFLED = "it hides which label is which, and not how many samples of each label a client has"
_MIXED = "inner products tell of label distributions, too"


@dataclass(frozen=True)
class MaskInfo:
    """What the result says of a mask: what stays visible to the server, what is assumed, and what
    it adds to every masked row.
    """

    shows: str
    not_covered: str
    padding_bytes: int = 0


INFO = {
    "none": MaskInfo("the values themselves", ""),
    "permutation": MaskInfo(
        "its sorted values, exact zeros, sum, norm and inner products with the others of that "
        "call, and which values of different clients belong to one coordinate",
        f"the permutation is obfuscation: it hides nothing from a client, and {_SEED}; "
        f"{_labels_told('permutation', _SHUFFLED)}",
    ),
    "signed-permutation": MaskInfo(
        "its sorted magnitudes, exact zeros, norm and inner products with the others of that call, "
        "and which values of different clients belong to one coordinate, up to that coordinate's "
        "sign",
        f"the signed permutation is obfuscation: it hides nothing from a client, and {_SEED}; "
        + _labels_told("signed-permutation", _SHUFFLED),
    ),
    "rotation": MaskInfo(
        "its norm and inner products with the others of that call, and its coordinates mixed by a "
        "structured rotation",
        "the rotation is obfuscation: it is made of public Hadamard matrices and secret signs, "
        "and that it shows no more than inner products is not proved; it hides nothing from a "
        f"client, and {_SEED}; {_labels_told('rotation', _MIXED)}",
    ),
    "haar": MaskInfo(
        "its norm and inner products with the others of that call (the Gram matrix), and in exact "
        "arithmetic nothing else",
        "the Haar rotation is obfuscation: that it shows the Gram matrix alone holds for a "
        "rotation that is used for one call only, up to rounding, and as far as ChaCha20 passes "
        f"for random; it hides nothing from a client, and {_SEED}; "
        + _labels_told("rotation", f"{_MIXED}, here as measured under `rotation`"),
    ),
}


class Permutation(Keyed["torch.Tensor"]):
    """Coordinates in an order drawn from PRF(seed, step), fresh for every call (Sattler et al.
    2019, V-B; fresh maps are ours).

    The order is the argsort of 64-bit words of a ChaCha20 stream with the shared seed as key and
    the step as nonce.
    """

    name: ClassVar[str] = "permutation"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """P_step applied to rows (b, d)."""
        return rows.index_select(-1, self._of(rows.shape[-1], step).to(rows.device))

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The same, written over `rows`; beside it there is one block of rows."""
        places = self._of(rows.shape[-1], step).to(rows.device)
        for block in blocks(rows):
            block.copy_(block.index_select(-1, places))
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """P_step⁻¹ applied to rows (b, d); exact."""
        return torch.empty_like(rows).index_copy_(
            -1, self._of(rows.shape[-1], step).to(rows.device), rows
        )

    def _draw(self, seed: bytes, d: int, step: int) -> torch.Tensor:
        return torch.from_numpy(order(seed, step, d))


class SignedPermutation(Keyed["tuple[torch.Tensor, torch.Tensor]"]):
    """A fresh permutation whose coordinates also take a secret sign each: y_j = s_j·x_π(j). All it
    needs is exact (ours).

    Besides what any orthonormal map keeps it keeps L1 and every other norm of coordinates; of a
    zero the server may see its sign bit, which is the mask's and tells nothing of the client.
    """

    name: ClassVar[str] = "signed-permutation"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """P_step applied to rows (b, d)."""
        places, flips = self._on(rows, step)
        return rows.index_select(-1, places).mul_(flips)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The same, written over `rows`; beside it there is one block of rows."""
        places, flips = self._on(rows, step)
        for block in blocks(rows):
            torch.mul(block.index_select(-1, places), flips, out=block)
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """P_step⁻¹ applied to rows (b, d); exact."""
        places, flips = self._on(rows, step)
        return torch.empty_like(rows).index_copy_(-1, places, rows * flips)

    def _on(self, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        places, flips = self._of(rows.shape[-1], step)
        return places.to(rows.device), flips.to(rows.device, rows.dtype)

    def _draw(self, seed: bytes, d: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(order(seed, step, d)), torch.from_numpy(
            np.asarray(signs(seed, step, d, SIGNS))
        )


def build(name: str, dimension: int | None = None) -> tuple[Stage, ...]:
    """The stages of a mask name.

    Args:
        dimension: d of the rows; a client needs it to undo a rotation. None builds what the server
            needs: the kinds of stages.

    Raises:
        UsageError: an unknown name, or a dense rotation of more than `rotations.DENSEST` numbers.
    """
    if name not in MASKS:
        raise unknown("mask", name, MASKS)
    if name == "haar":
        check_dense(dimension)
    stages: dict[str, tuple[Stage, ...]] = {
        "none": (),
        "permutation": (Permutation(),),
        "signed-permutation": (SignedPermutation(),),
        "rotation": (Rotation(dimension),),
        "haar": (Haar(),),
    }
    return stages[name]


def width(name: str, dimension: int) -> int:
    """The numbers in a masked row of d."""
    return Pipeline(build(name)).room(dimension)


def describe(name: str, dimension: int, itemsize: int) -> MaskInfo:
    """What the result says of a mask on rows of d numbers of `itemsize` bytes."""
    return replace(INFO[name], padding_bytes=(width(name, dimension) - dimension) * itemsize)
