"""Where samples come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Source:
    """A pool of labelled samples: x (n, channels, height, width) float32 in [0, 1], y (n,) int64 in 0 … classes − 1."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int


@cache
def digits() -> Source:
    """scikit-learn's bundled handwritten digits: 1797 images of 8 × 8, ten classes; nothing is downloaded."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Source((bunch.images / 16).astype(np.float32)[:, None], bunch.target.astype(np.int64), 10)


SOURCES: dict[str, Callable[[], Source]] = {"digits": digits}
