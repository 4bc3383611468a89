"""Masks in two blocks: orthonormal, undone, and blind to what the other block holds."""

from __future__ import annotations

import pytest
import torch

from securecluster.errors import UsageError
from securecluster.privacy.masking.block_mask import Blocks
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline

MASKS = ("permutation", "signed-permutation", "rotation", "haar")


def blocks(mask: str, first: int = 30, rest: int = 21) -> Blocks:
    made = Blocks(mask, first, rest)
    made.unlock(bytes(range(32)))
    return made


@pytest.mark.parametrize("mask", MASKS)
def test_it_keeps_inner_products_and_is_undone(mask: str) -> None:
    rows = torch.randn(4, 51, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = blocks(mask)
    out = made.forward(rows, 5)
    assert out.shape == (4, made.width(51))
    torch.testing.assert_close(out @ out.T, rows @ rows.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(made.inverse(out, 5), rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(made.inverse(out[0], 5), rows[0], rtol=0, atol=1e-12)
    assert not torch.equal(out, made.forward(rows, 6))


@pytest.mark.parametrize("mask", MASKS)
def test_each_block_is_a_function_of_its_own_numbers_alone(mask: str) -> None:
    rows = torch.randn(2, 51, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    other = rows.clone()
    other[:, 30:] = 0
    made = blocks(mask)
    one, two = made.forward(rows, 5), made.forward(other, 5)
    assert torch.equal(one[:, : made.cut], two[:, : made.cut])
    assert not bool(two[:, made.cut :].any())
    # what the servers do
    mixed = torch.cat(
        [one[:, : made.cut].mean(0, keepdim=True).expand(2, -1), one[:, made.cut :]], 1
    )
    undone = made.inverse(mixed, 5)
    torch.testing.assert_close(
        undone[:, :30], rows[:, :30].mean(0, keepdim=True).expand(2, -1), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(undone[:, 30:], rows[:, 30:], rtol=0, atol=1e-12)


def test_blocks_of_one_size_are_masked_by_different_maps() -> None:
    made = blocks("permutation", 40, 40)
    out = made.forward(torch.arange(40.0).repeat(2)[None], 5)[0]
    assert not torch.equal(out[:40], out[40:])


def test_a_pipeline_hands_the_seed_to_all_that_need_it_and_knows_its_width() -> None:
    rows = torch.randn(2, 51, generator=torch.Generator().manual_seed(3))
    pipeline = Pipeline(
        (Blocks("rotation", 30, 21),), fields={"vectors": Pipeline(build("rotation", 21))}
    )
    pipeline.unlock(bytes(range(32)))
    assert pipeline.keyed
    assert not Pipeline().keyed
    assert pipeline.width(51) == pipeline.forward(rows, 1).shape[1] > 51
    assert pipeline.of("delta") is pipeline
    vectors, some = pipeline.of("vectors"), rows[:, :21]
    torch.testing.assert_close(vectors.inverse(vectors.forward(some, 1), 1), some)


def test_a_block_too_large_for_a_dense_rotation_is_refused() -> None:
    Blocks("haar", 2048, 2048)
    with pytest.raises(UsageError, match="rotation"):
        Blocks("haar", 2049, 10)
