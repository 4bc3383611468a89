"""Arrays of numbers that attacks work on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch

Array = NDArray[Any]


def as_array(values: torch.Tensor) -> Array:
    """Return the numbers of a tensor in double precision.

    Args:
        values: the tensor.
    """
    return np.asarray(values.double().cpu().numpy())


def flat_rows(samples: Array) -> Array:
    """Return samples as rows in double precision, (n, D).

    Args:
        samples: (n, …).
    """
    return np.asarray(samples, float).reshape(len(samples), -1)


def sample_keys(samples: Array) -> list[bytes]:
    """Return the bytes of each sample, by which equal ones are found.

    Args:
        samples: (n, …).
    """
    return [np.ascontiguousarray(sample).tobytes() for sample in samples]
