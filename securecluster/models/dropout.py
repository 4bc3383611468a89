"""Dropout whose masks follow from a key, so that a client's training does not depend on who else
trains, or in which order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from securecluster.errors import UsageError


class SeededDropout(nn.Module):
    """As `nn.Dropout` (whole channels where `channels`), drawn from a key; without a key it does
    nothing.

    Args:
        p: the share that is dropped, in [0, 1).
        number: tells the layers of one network apart.
    """

    def __init__(self, p: float, number: int, channels: bool = False) -> None:
        super().__init__()
        self.p, self.number, self.channels = p, number, channels
        self.key: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, …); the mask of a sample depends on its place in the mini-batch alone."""
        if self.key is None or self.p == 0:
            return x
        self.calls += 1
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.channels else x.shape
        place = torch.arange(shape.numel(), device=x.device).view(shape)
        kept = _words(_mixed(self.key + (self.number << 20) + self.calls) + place) >= self._least
        return x * kept / (1 - self.p)

    @property
    def _least(self) -> int:
        """The least of 24 bits that, as a number in [0, 1), is not below p in float32."""
        return math.ceil(float(torch.tensor(self.p, dtype=torch.float32)) * (1 << 24))


_KINDS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


def with_seeded_dropout(module: nn.Module) -> nn.Module:
    """A copy in which every dropout layer is a seeded one.

    Raises:
        UsageError: a dropout layer of another kind.
    """
    module = copy.deepcopy(module)
    layers = [
        (parent, name, part)
        for parent in module.modules()
        for name, part in parent._modules.items()
    ]
    # a layer under two names is drawn once for each
    for number, (parent, name, part) in enumerate(layers):
        if isinstance(part, nn.modules.dropout._DropoutNd):
            if type(part) not in _KINDS or not 0 <= part.p < 1:
                raise UsageError(
                    f"{type(part).__name__}(p={part.p}) cannot be drawn per client: use nn.Dropout "
                    "or nn.Dropout2d with p < 1"
                )
            setattr(parent, name, SeededDropout(part.p, number, _KINDS[type(part)]))
    return module


@contextmanager
def seeded(layers: list[SeededDropout], key: torch.Tensor | None) -> Iterator[None]:
    """Draw the masks of one forward pass from `key` (int64)."""
    for layer in layers:
        layer.key, layer.calls = key, 0
    try:
        yield
    finally:
        for layer in layers:
            layer.key = None


def example_keys(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A key for each example, from its mini-batch's key and its own number, int64: so its mask does
    not depend on who else is drawn.
    """
    return _mixed(keys + numbers * -0x61C8864680B583EB)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function (Steele, Lea, Flood 2014) on int64 words, which wrap around."""
    z = z ^ _shifted(z, 30)
    # in place: a new tensor an operation would take as long as the operation
    z.mul_(-0x40A7B892E31B1A47)
    z.bitwise_xor_(_shifted(z, 27)).mul_(-0x6B2FB644ECCEEE15)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z >> bits without the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _words(z: torch.Tensor) -> torch.Tensor:
    """24 bits of each word, mixed once more."""
    return _shifted(_mixed(z * -0x61C8864680B583EB), 40)
