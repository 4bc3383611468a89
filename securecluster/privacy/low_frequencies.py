"""The lowest frequencies of images, in which classes differ more than single images do.

Noise that a release adds is in proportion to the norm of an example, so whatever in an example
tells nothing of its class costs accuracy. A natural image has most of its power in low frequencies,
and those of the classes' means are lower still. The transform is public and the same for all data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch

# frequencies of an image in each direction; further ones are mostly noise; found by trial
FREQUENCIES = 7


def lowest_waves(length: int) -> NDArray[np.float64]:
    """Return the lowest frequencies of the orthonormal DCT-II as rows, (f, length).

    Args:
        length: numbers in a row of pixels; f is `FREQUENCIES`, or length where that is less.
    """
    count = min(FREQUENCIES, length)
    frequencies = np.arange(count)[:, None]
    positions = np.arange(length)[None] + 0.5
    waves = np.cos(math.pi * frequencies * positions / length) * math.sqrt(2 / length)
    # the constant has twice the squared norm of the other waves
    waves[0] *= math.sqrt(0.5)
    return np.asarray(waves)


@dataclass(frozen=True)
class LowFrequencies:
    """A public map from images to their lowest frequencies in both directions.

    Args:
        shape: channels, height and width of an image.
    """

    shape: tuple[int, int, int]

    @property
    def width(self) -> int:
        """Return the numbers that an image has afterwards."""
        channels, height, width = self.shape
        return channels * min(FREQUENCIES, height) * min(FREQUENCIES, width)

    def of(self, images: torch.Tensor) -> torch.Tensor:
        """Return the lowest frequencies of images, (n, width) float64.

        In double precision, so that rounding, which depends on how many images there are, stays
        small beside an image that has hardly any low frequencies.

        Args:
            images: (n, channels·height·width).
        """
        _, height, width = self.shape
        down = torch.from_numpy(lowest_waves(height)).to(images.device)
        across = torch.from_numpy(lowest_waves(width)).to(images.device)
        # a two-dimensional DCT is one along columns and one along rows
        spectra = down @ images.double().view(-1, *self.shape) @ across.T
        return spectra.flatten(1)
