"""The embedded digits are scikit-learn's, whether they are read from its file or through it."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from securecluster.data import datasets


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_scikit_learns(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    if not found:
        monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    bunch = load_digits()
    pool = datasets.digits.__wrapped__().train
    np.testing.assert_array_equal(pool.x, (bunch.images[:, None] / 16).astype(np.float32))
    np.testing.assert_array_equal(pool.y, bunch.target)


def test_pixels_are_means_of_two_by_two() -> None:
    whole = datasets.digits()
    half = datasets.halved("digits4", whole)
    rows = np.array([5, 0, 5])
    x, found = whole.train.read(rows), half.train.read(rows)
    assert found.shape == (3, *half.shape) == (3, 1, 4, 4)
    assert found.dtype == np.float32
    assert found[1, 0, 3, 0] == x[1, 0, 6:, :2].mean(dtype=np.float64)
    assert half.train.y is whole.train.y and half.test is None and half.name == "digits4"
