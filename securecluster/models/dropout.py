"""Dropout whose masks follow from a key.

So a client's training does not depend on which other clients train, or in which order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from securecluster.errors import UsageError

WORD_BITS = 64
DRAWN_BITS = 24  # of each word; float32 represents all such numbers exactly
# constants of SplitMix64 (Steele, Lea, Flood 2014) as int64: the golden ratio, and two multipliers
GOLDEN = -0x61C8864680B583EB
FIRST_MULTIPLIER = -0x40A7B892E31B1A47
SECOND_MULTIPLIER = -0x6B2FB644ECCEEE15
LAYER_SHIFT = 20  # low bits of a mask's key that count a layer's calls in one forward pass


class SeededDropout(nn.Module):
    """Dropout as `nn.Dropout`, drawn from a key; without a key it does nothing.

    Args:
        p: share of dropped values, in [0, 1).
        number: number of the layer, which gives each layer of a network other masks.
        channels: True to drop whole channels.
    """

    def __init__(self, p: float, number: int, channels: bool = False) -> None:
        super().__init__()
        self.p = p
        self.number = number
        self.channels = channels
        self.key: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with dropped values, the others scaled by 1 / (1 − p).

        Args:
            x: (n, …). A sample's mask depends only on its position in the mini-batch.
        """
        if self.key is None or self.p == 0:
            return x
        self.calls += 1
        shape = x.shape
        if self.channels:
            shape = x.shape[:2] + (1,) * (x.ndim - 2)
        positions = torch.arange(shape.numel(), device=x.device).view(shape)
        layer_key = self.key + (self.number << LAYER_SHIFT)
        call_key = _mixed(layer_key + self.calls)
        mask = _drawn_bits(call_key + positions) >= self._threshold
        return x * mask / (1 - self.p)

    @property
    def _threshold(self) -> int:
        """Return the smallest 24-bit number that, scaled to [0, 1), is at least p in float32."""
        p = float(torch.tensor(self.p, dtype=torch.float32))
        return math.ceil(p * (1 << DRAWN_BITS))


# kinds of dropout layers, and if they drop whole channels
_KINDS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


def with_seeded_dropout(module: nn.Module) -> nn.Module:
    """Return a copy in which every dropout layer is a seeded one.

    Args:
        module: any module.

    Raises:
        UsageError: a dropout layer of another kind.
    """
    module = copy.deepcopy(module)
    # All children first: replacing while walking would change what is walked.
    children = []
    for parent in module.modules():
        for name, child in parent._modules.items():
            children.append((parent, name, child))
    # A layer under two names is drawn once for each.
    for number, (parent, name, child) in enumerate(children):
        if isinstance(child, nn.modules.dropout._DropoutNd):
            setattr(parent, name, _as_seeded(child, number))
    return module


@contextmanager
def seeded(layers: list[SeededDropout], key: torch.Tensor | None) -> Iterator[None]:
    """Draw the masks of one forward pass from a key.

    Args:
        layers: the network's dropout layers.
        key: a scalar int64; None for no dropout.
    """
    for layer in layers:
        layer.key = key
        layer.calls = 0
    try:
        yield
    finally:
        for layer in layers:
            layer.key = None


def example_keys(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a key for each example, so that its mask does not depend on the others drawn.

    Args:
        keys: key of each example's mini-batch, int64.
        numbers: each example's number, int64 of a shape that broadcasts with it.
    """
    return _mixed(keys + numbers * GOLDEN)


def _as_seeded(layer: nn.modules.dropout._DropoutNd, number: int) -> SeededDropout:
    """Return the seeded layer for a dropout layer; raise UsageError for another kind."""
    layer_type = type(layer)
    if layer_type not in _KINDS or not 0 <= layer.p < 1:
        raise UsageError(
            f"{layer_type.__name__}(p={layer.p}) cannot be drawn per client: use nn.Dropout "
            "or nn.Dropout2d with p < 1"
        )
    return SeededDropout(layer.p, number, _KINDS[layer_type])


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output function of int64 words, which wrap around."""
    z = z ^ _shifted(z, 30)
    # In place: a new tensor for each operation would take as long as the operation.
    z.mul_(FIRST_MULTIPLIER)
    z.bitwise_xor_(_shifted(z, 27))
    z.mul_(SECOND_MULTIPLIER)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical shift z >> bits, without the sign."""
    mask = (1 << (WORD_BITS - bits)) - 1
    return (z >> bits).bitwise_and_(mask)


def _drawn_bits(z: torch.Tensor) -> torch.Tensor:
    """Return 24 bits of each word, mixed once more."""
    mixed = _mixed(z * GOLDEN)
    return _shifted(mixed, WORD_BITS - DRAWN_BITS)
