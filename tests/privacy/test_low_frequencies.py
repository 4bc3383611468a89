"""Lowest frequencies of images against SciPy's transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.fft import dctn

from securecluster.privacy.low_frequencies import FREQUENCIES, LowFrequencies


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 20, 9), (2, 5, 32)])
def test_they_are_those_of_scipys_orthonormal_transform(shape: tuple[int, int, int]) -> None:
    images = np.random.default_rng(0).normal(size=(4, *shape))
    spectra = dctn(images, axes=(2, 3), norm="ortho")[:, :, :FREQUENCIES, :FREQUENCIES]
    low = LowFrequencies(shape)
    found = low.of(torch.from_numpy(images).float().flatten(1))
    assert found.dtype == torch.float64 and found.shape == (4, low.width)
    np.testing.assert_allclose(found.numpy(), spectra.reshape(4, -1), atol=1e-5)


def test_an_image_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    images = torch.rand(3, 256, generator=torch.Generator().manual_seed(0))
    low = LowFrequencies((1, 16, 16))
    expected = low.of(images)
    images[1, 7] = float("nan")
    found = low.of(images)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert not found[1].isfinite().any()
