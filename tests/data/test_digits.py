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
