"""Sketches: unbiased, as exact as theory says, and as good as a dense Gaussian projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.random_projection import GaussianRandomProjection

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.privacy.compression.sketches import Sketch
from securecluster.privacy.masking import hadamard
from securecluster.privacy.masking.rotations import Haar, padded
from securecluster.privacy.pipeline import Kind, Pipeline


def rows(seed: int, count: int = 6, d: int = 1000) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(2, d))
    return torch.from_numpy(centres[np.arange(count) % 2] + 0.5 * draw.normal(size=(count, d)))


def gram(x: torch.Tensor) -> np.ndarray:
    return (x.double() @ x.double().T).numpy()


def test_it_is_the_printed_product():
    d, q, step = 30, 7, 3
    sketch, n = Sketch(q, Randomness(5)), padded(d)
    signs, picked = sketch._map(d, step)
    matrix = np.ones((1, 1))
    for order in hadamard.factors(d):
        matrix = np.kron(matrix, hadamard.matrix(order))
    x = rows(0, 4, d)
    wide = np.zeros((4, n))
    wide[:, :d] = x.numpy() * signs.numpy()
    expected = np.sqrt(n / q) * (wide @ (matrix / np.sqrt(n)).T)[:, picked.numpy()]
    np.testing.assert_allclose(sketch.forward(x, step).numpy(), expected, rtol=0, atol=1e-12)
    assert len(set(picked.tolist())) == q, "rows are drawn without replacement"


@pytest.mark.parametrize("sparse", [False, True])
def test_inner_products_are_unbiased_and_scatter_as_theory_says(sparse):
    x, q, calls = rows(1), 64, 400
    if sparse:  # two numbers a row: what a dense projection would not mind either
        x = torch.zeros_like(x)
        x[:, 3], x[:, 700] = torch.arange(1.0, 7.0), 2.0
    true, sketch = gram(x), Sketch(q, Randomness(0))
    found = np.stack([gram(sketch.forward(x, step)) for step in range(calls)])
    # of a dense Gaussian projection's scatter
    bound = np.sqrt((np.outer(np.diag(true), np.diag(true)) + true**2) / q)
    assert (np.abs(found.mean(0) - true) < 4.5 * bound / np.sqrt(calls)).all()
    assert (found.std(0) < 1.15 * bound).all()


def test_cosines_err_as_those_of_a_dense_gaussian_projection():
    x, q = rows(2, 20, 2000), 128
    size = np.sqrt(np.diag(gram(x)))
    truth = gram(x) / size[:, None] / size

    def error(y: np.ndarray) -> float:
        norm = np.linalg.norm(y, axis=1)
        off = (y @ y.T / norm[:, None] / norm - truth)[~np.eye(20, dtype=bool)]
        return float(np.sqrt((off**2).mean()))

    ours = np.mean([error(Sketch(q, Randomness(0)).forward(x, step).numpy()) for step in range(20)])
    theirs = [GaussianRandomProjection(q, random_state=k) for k in range(20)]
    dense = np.mean([error(projection.fit_transform(x.numpy())) for projection in theirs])
    assert 0.6 * dense < ours < 1.15 * dense
    assert ours < 1.1 / np.sqrt(q)


def test_the_map_is_public_fresh_for_each_call_and_the_same_for_all():
    x = rows(3)
    one, other = Sketch(32, Randomness(7)), Sketch(32, Randomness(7))
    assert torch.equal(one.forward(x, 4), other.forward(x, 4))
    assert not torch.allclose(one.forward(x, 4), one.forward(x, 5))
    assert not torch.allclose(one.forward(x, 4), Sketch(32, Randomness(8)).forward(x, 4))
    assert torch.allclose(one.forward(x[2:3], 4), one.forward(x, 4)[2:3], rtol=0, atol=1e-12), (
        "a batch of one"
    )


def test_rows_in_several_blocks_and_float32():
    x = rows(4, 300, 3000)
    whole = Sketch(16, Randomness(0)).forward(x, 1)
    assert torch.allclose(
        Sketch(16, Randomness(0)).forward(x.float(), 1).double(), whole, atol=1e-3
    )
    assert torch.allclose(whole[299], Sketch(16, Randomness(0)).forward(x[299:], 1)[0], atol=1e-12)
    assert not Sketch(16, Randomness(0)).forward(torch.zeros(2, 3000), 1).any(), (
        "a zero row stays one"
    )


def test_what_it_refuses():
    for q in (0, -1, 2.5, True):
        with pytest.raises(UsageError, match="whole number"):
            Sketch(q, Randomness(0))
    with pytest.raises(UsageError, match="no shorter"):
        Sketch(30, Randomness(0)).forward(torch.ones(1, 30), 1)
    with pytest.raises(UsageError, match="sketch cannot follow mask"):
        Pipeline([Haar(), Sketch(4, Randomness(0))])


def test_a_pipeline_knows_its_width():
    assert Sketch.kind is Kind.SKETCH
    assert Pipeline([Sketch(64, Randomness(0))]).width(5000) == 64
