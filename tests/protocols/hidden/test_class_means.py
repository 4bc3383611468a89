"""Points of clients: class means with public smoothing and a public sketch."""

from __future__ import annotations

import numpy as np
import torch
from scipy.fft import dctn

from securecluster.privacy.low_frequencies import FREQUENCIES
from securecluster.protocols.hidden.class_means import PRIOR, ClassMeans


def test_a_point_is_a_sketch_of_centred_class_means() -> None:
    draw = np.random.default_rng(0)
    x = draw.random((40, 1, 9, 9))
    y = draw.integers(0, 2, 40)
    sketch = ClassMeans((1, 9, 9), 3, 8, seed=5)
    weights, means = [], []
    for label in range(3):
        count = (y == label).sum()
        weights.append(count / (count + PRIOR))
        mean = x[y == label].mean(0) if count else np.zeros((1, 9, 9))
        spectrum = dctn(mean, axes=(1, 2), norm="ortho")
        means.append(spectrum[:, :FREQUENCIES, :FREQUENCIES].ravel())
    centre = np.average(means, axis=0, weights=weights)
    expected = np.concatenate([w * (m - centre) for w, m in zip(weights, means, strict=True)])
    np.testing.assert_allclose(
        sketch.point(torch.as_tensor(x), y.tolist()), expected @ sketch._sketch, atol=1e-9
    )
    assert expected[2 * FREQUENCIES**2 :].any() == np.False_  # no sample of the third class


def test_points_do_not_follow_how_often_a_class_occurs() -> None:
    draw = np.random.default_rng(1)
    means = draw.standard_normal((4, 6))

    def point(counts: list[int], order: list[int]) -> np.ndarray:
        y = np.repeat(np.arange(4), counts)
        x = means[y] + 0.01 * draw.standard_normal((len(y), 6))
        relabelled = np.asarray(order)[y]
        row = ClassMeans((6,), 4, 40, seed=0).point(torch.as_tensor(x), relabelled.tolist())
        return np.asarray(row / np.linalg.norm(row))

    even = point([50, 50, 50, 50], [0, 1, 2, 3])
    skewed = point([140, 20, 20, 20], [0, 1, 2, 3])
    swapped = point([50, 50, 50, 50], [1, 0, 2, 3])
    assert even @ skewed > 0.9 > 0.5 > even @ swapped
