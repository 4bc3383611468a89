"""Masks: orthonormal maps that all clients of a run share and the server does not have.

A mask is obfuscation, not encryption. It protects against the server only, and one client that
sends the server the shared seed undoes it. Every orthonormal map keeps norms and inner products, by
which clients can also be linked from call to call.

A permutation hides which label is which, and not a client's label distribution: coordinates of one
call are columns over clients, and grouping columns that move alike recovers the distributions
(`benchmarks.leaks.label_attack`, whose results are in `LABELS`).

A package outside this project declares its masks as entry points, which lead to the module that
registers them:

    [project.entry-points."securecluster.masks"]
    sign-flips = "my_package.sign_flips"

Masks are fresh for each call, keyed by its number: a map that is used again would show the Gram
matrix of several rounds at once. Newcomers alone answer under the mask of an earlier call, in which
they took no part, so no client sends two rows under one mask within a run or one `join`. The
exception is SR-FCA with l2, whose members post their cluster's model under the mask of the one-shot
models that it is compared with.

Under fresh masks the server cannot add the averages of different rounds. Where it must keep a model
(a split, the clustering round of FL+HC, the leaves), a member that has all averages posts it
masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np

from securecluster.core import installed_packages
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.privacy.masking.keystream import (
    SIGNS,
    Keyed,
    gather,
    order,
    order_there,
    signs,
    signs_there,
)
from securecluster.privacy.masking.rotations import Haar, RotationMask, check_dense
from securecluster.privacy.pipeline import Pipeline, Stage

GROUP = "securecluster.masks"  # of entry points
TYPING_ERROR = 0.85  # likeness of names that differ by a slip; a suffix in common is none

# Names of the masks that are registered; `register` adds to them.
MASKS = ["none", "permutation", "signed-permutation", "rotation", "haar"]
PARTS = installed_packages.Parts("mask", GROUP, tuple(MASKS), "SECURECLUSTER_MASKS")
# Masks that keep each number's magnitude, hence L1 and every norm of coordinates.
ENTRYWISE = {"none", "permutation", "signed-permutation"}
_SEED = (
    "falls when one client tells the server the shared seed; clients can be linked from call to "
    "call by their inner products"
)

# Correlation of recovered label shares with the true ones, for Dirichlet(0.3) and for two labels a
# client, as measured by benchmarks.leaks.label_attack.
LABELS = {"permutation": (0.88, 0.99), "signed-permutation": (0.86, 0.97), "rotation": (0.64, 0.71)}


def _label_leakage(name: str, hidden: str) -> str:
    """Return the sentence of a mask's description about label distributions.

    Args:
        name: name of the mask, a key of `LABELS`.
        hidden: clause that says what the mask hides or reveals of them.
    """
    skewed, two = LABELS[name]
    return (
        f"{hidden}: from the updates of 40 clients in one round their label distributions were "
        f"read, up to the labels' names, with a correlation of {skewed} and {two} (chance 0.3; "
        "python -m benchmarks.leaks.label_attack in the repository)"
    )


_SHUFFLED = "it hides which label is which, and not how many samples of each label a client has"
_ORDER_HIDDEN = "which coordinate is which"
_MIXED = "inner products tell of label distributions, too"


@dataclass(frozen=True)
class MaskInfo:
    """Description of a mask in results.

    Args:
        shows: what stays visible to the server.
        not_covered: attacks that the mask does not cover, and assumptions.
        padding_bytes: bytes that the mask adds to every row.
        hides: what of a masked row stays hidden from the server.
    """

    shows: str
    not_covered: str
    padding_bytes: int = 0
    hides: str = "single coordinates, which are mixed,"


INFO = {
    "none": MaskInfo("the values themselves", ""),
    "permutation": MaskInfo(
        "its sorted values, exact zeros, sum, norm and inner products with the others of that "
        "call, and which values of different clients belong to one coordinate",
        f"the permutation is obfuscation: it hides nothing from a client, and {_SEED}; "
        f"{_label_leakage('permutation', _SHUFFLED)}",
        hides=_ORDER_HIDDEN,
    ),
    "signed-permutation": MaskInfo(
        "its sorted magnitudes, exact zeros, norm and inner products with the others of that call, "
        "and which values of different clients belong to one coordinate, up to that coordinate's "
        "sign",
        f"the signed permutation is obfuscation: it hides nothing from a client, and {_SEED}; "
        + _label_leakage("signed-permutation", _SHUFFLED),
        hides=_ORDER_HIDDEN,
    ),
    "rotation": MaskInfo(
        "its norm and inner products with the others of that call, and its coordinates mixed by a "
        "structured rotation",
        "the rotation is obfuscation: it is made of public Hadamard matrices and secret signs, "
        "and that it shows no more than inner products is not proved; it hides nothing from a "
        f"client, and {_SEED}; {_label_leakage('rotation', _MIXED)}",
    ),
    "haar": MaskInfo(
        "its norm and inner products with the others of that call (the Gram matrix), and in exact "
        "arithmetic nothing else",
        "the Haar rotation is obfuscation: that it shows the Gram matrix alone holds for a "
        "rotation that is used for one call only, up to rounding, and as far as ChaCha20 passes "
        f"for random; it hides nothing from a client, and {_SEED}; "
        + _label_leakage("rotation", f"{_MIXED}, here as measured under `rotation`"),
    ),
}


class Permutation(Keyed["torch.Tensor"]):
    """Secret order of the coordinates, fresh for every call (Sattler et al. 2019, V-B).

    That it is drawn anew for every call is not in the paper. The order is the argsort of 64-bit
    words of a ChaCha20 stream with the shared seed as key and the step as nonce.
    """

    name: ClassVar[str] = "permutation"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return permuted rows (b, d) in new memory.

        Args:
            rows: rows (b, d).
            step: number of the call.
        """
        return rows.index_select(-1, self._positions(rows, step))

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Permute `rows` (b, d) in place; the only new memory is a row, or one block of rows.

        Args:
            rows: rows (b, d).
            step: number of the call.
        """
        gather(rows, self._positions(rows, step))
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (b, d) with the permutation undone; exact.

        Args:
            rows: permuted rows (b, d).
            step: number of the call that they were permuted in.
        """
        positions = self._positions(rows, step)
        restored = torch.empty_like(rows)
        return restored.index_copy_(-1, positions, rows)

    def _positions(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the position that each coordinate is taken from, (d,), on the rows' device."""
        d = rows.shape[-1]
        return self._of(d, step, rows.device)

    def _draw(self, seed: bytes, d: int, step: int) -> torch.Tensor:
        return torch.from_numpy(order(seed, step, d))

    def _draw_there(self, seed: bytes, d: int, step: int, device: torch.device) -> torch.Tensor:
        return order_there(seed, step, d, device)


class SignedPermutation(Keyed["tuple[torch.Tensor, torch.Tensor]"]):
    """Fresh permutation π with a secret sign s for each coordinate: y_j = s_j·x_π(j).

    It is not in the papers. All its operations are exact. Besides what any orthonormal map keeps,
    it keeps L1 and every other norm of coordinates. Of a zero the server may read the sign bit,
    which is the mask's and independent of the client.
    """

    name: ClassVar[str] = "signed-permutation"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return masked rows (b, d) in new memory.

        Args:
            rows: rows (b, d).
            step: number of the call.
        """
        positions, flips = self._map(rows, step)
        return rows.index_select(-1, positions).mul_(flips)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Mask `rows` (b, d) in place; the only new memory is a row, or one block of rows.

        Args:
            rows: rows (b, d).
            step: number of the call.
        """
        positions, flips = self._map(rows, step)
        gather(rows, positions, flips)
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (b, d) with the mask undone; exact.

        Args:
            rows: masked rows (b, d).
            step: number of the call that they were masked in.
        """
        positions, flips = self._map(rows, step)
        restored = torch.empty_like(rows)
        return restored.index_copy_(-1, positions, rows * flips)

    def _map(self, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return π and s, (d,) each, on the rows' device; s in the rows' type."""
        d = rows.shape[-1]
        positions, flips = self._of(d, step, rows.device)
        return positions, flips.to(rows.dtype)

    def _draw(self, seed: bytes, d: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.from_numpy(order(seed, step, d))
        flips = np.asarray(signs(seed, step, d, SIGNS))
        return positions, torch.from_numpy(flips)

    def _draw_there(
        self, seed: bytes, d: int, step: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flips = signs_there(seed, step, d, SIGNS, device)
        return order_there(seed, step, d, device), flips


def _haar(dimension: int | None) -> Haar:
    check_dense(dimension)
    return Haar()


# Makes the stage of a mask for rows of this many numbers; None where only its kind matters.
MakeStage = Callable[[int | None], Stage]
_MAKERS: dict[str, MakeStage] = {
    "permutation": lambda dimension: Permutation(),
    "signed-permutation": lambda dimension: SignedPermutation(),
    "rotation": RotationMask,
    "haar": _haar,
}


def register(name: str, make: MakeStage, info: MaskInfo, entrywise: bool = False) -> None:
    """Add a mask, so that the option `mask` takes its name in this process.

    Args:
        name: name of the mask, and of its stage.
        make: returns a new stage of kind MASK for rows of d numbers. It is called with None at the
            server, which has no seed and needs the kind of the stage only.
        info: description of the mask in results.
        entrywise: True if the mask keeps each number's magnitude.

    Raises:
        UsageError: there is a mask of this name.
    """
    if name in MASKS:
        raise UsageError(f"there is a mask {name!r} already: give yours another name")
    MASKS.append(name)
    INFO[name] = info
    _MAKERS[name] = make
    if entrywise:
        ENTRYWISE.add(name)


def mask_names() -> list[str]:
    """Return the names of all masks: those that are registered, and those that packages declare."""
    return list(dict.fromkeys([*MASKS, *PARTS.names()]))


def check_known(name: str) -> None:
    """Check that there is a mask, and register it if an installed package declares it.

    Args:
        name: name of the mask.

    Raises:
        UsageError: an unknown name, or a declaration that leads to no mask of the name.
    """
    if name in MASKS:
        return
    if name not in PARTS.others():
        raise _unknown(name)
    _check_registered(PARTS.point(name))


def _check_registered(point: EntryPoint) -> None:
    """Raise UsageError for an entry point whose module registers no mask of its name."""
    declaration, _ = PARTS.loaded(point)
    if point.name not in MASKS:
        raise UsageError(
            f"{declaration}, is not registered there: call masks.register with this name in that "
            "module"
        )


def named(name: str) -> str:
    """Return the name of a mask, which is known by it from then on.

    Only what a user types may be a path: a folder or a server that names one would have its code
    run.

    Args:
        name: of a mask, or "module:Class" of its stage, which is called `Class.name` and is
            registered in its module. That may lie in the current folder.

    Raises:
        UsageError: it cannot be imported, is registered under no such name, or has that of another
            mask.
    """
    return PARTS.give(name, _check_registered) if ":" in name else name


def _unknown(name: str) -> UsageError:
    """Return the error for a name that no mask has."""
    names = sorted(mask_names())
    closest = get_close_matches(str(name), names, n=1, cutoff=TYPING_ERROR)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    return UsageError(
        f"unknown mask {name!r}: {hint}choose one of {', '.join(names)}; for a mask of your own, "
        f"import the module that registers it, or declare it as an entry point of {GROUP}"
    )


def build(name: str, dimension: int | None = None) -> tuple[Stage, ...]:
    """Return the stages of a mask.

    Args:
        name: name of the mask, one of `mask_names`.
        dimension: d of the rows; a client needs it to undo a rotation. None builds what the server
            needs: the kinds of stages.

    Raises:
        UsageError: an unknown name, or a dense rotation of more than `rotations.DENSEST` numbers.
    """
    check_known(name)
    if name == "none":
        return ()
    return (_MAKERS[name](dimension),)


def width(name: str, dimension: int) -> int:
    """Return the numbers in a masked row.

    Args:
        name: name of the mask.
        dimension: numbers in a row.
    """
    return Pipeline(build(name)).buffer_width(dimension)


def describe(name: str, dimension: int, itemsize: int) -> MaskInfo:
    """Return the description of a mask in results.

    Args:
        name: name of the mask.
        dimension: numbers in a row.
        itemsize: bytes of a number.
    """
    padding = width(name, dimension) - dimension
    return replace(INFO[name], padding_bytes=padding * itemsize)
