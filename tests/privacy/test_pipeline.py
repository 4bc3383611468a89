"""The one order of stages."""

from __future__ import annotations

import itertools

import pytest
import torch

from securecluster.errors import UsageError
from securecluster.privacy.pipeline import Kind, Pipeline


class Fake:
    """An affine map of its own, so that order shows."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.name = kind, kind.name.lower()
        self.steps: list[int] = []

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        self.steps.append(step)
        return rows * (2 + self.kind) + 1

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        self.steps.append(-step)
        return (rows - 1) / (2 + self.kind)


ORDERS = [kinds for n in range(4) for kinds in itertools.product(Kind, repeat=n)] + list(
    itertools.permutations(Kind)
)


def is_legal(kinds: tuple[Kind, ...]) -> bool:
    return list(kinds) == sorted(set(kinds)) and (Kind.NOISE not in kinds or Kind.CLIP in kinds)


def test_the_legal_orders_are_the_ordered_subsets_whose_noise_has_a_clip() -> None:
    legal = []
    for kinds in ORDERS:
        stages = [Fake(kind) for kind in kinds]
        if is_legal(kinds):
            legal.append(kinds)
            assert Pipeline(stages).stages == tuple(stages)
        else:
            with pytest.raises(UsageError) as caught:
                Pipeline(stages)
            assert "\n" not in str(caught.value)
    # none, one, two, three and five of five; noise alone or without clip is out
    assert len(legal) == 1 + 4 + (10 - 3) + (10 - 3) + 1
    assert tuple(Kind) in legal


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        ([Kind.NOISE], "noise without a clip bounds nothing"),
        ([Kind.NOISE, Kind.MASK], "noise without a clip bounds nothing"),
        ([Kind.SKETCH, Kind.NOISE], "noise without a clip bounds nothing"),
        ([Kind.NOISE, Kind.CLIP], "clip cannot follow noise"),
        ([Kind.MASK, Kind.NOISE], "noise cannot follow mask"),
        ([Kind.MASK, Kind.CLIP], "clip cannot follow mask"),
        ([Kind.QUANTISE, Kind.MASK], "mask cannot follow quantise"),
        ([Kind.CLIP, Kind.SKETCH], "sketch cannot follow clip"),
        ([Kind.MASK, Kind.MASK], "mask cannot follow mask"),
    ],
)
def test_illegal_orders_say_what_is_wrong(kinds: list[Kind], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Pipeline([Fake(kind) for kind in kinds])


def test_stages_apply_in_order_with_the_step_and_are_undone_in_reverse() -> None:
    stages = [Fake(Kind.CLIP), Fake(Kind.NOISE), Fake(Kind.MASK)]
    pipeline = Pipeline(stages)
    there = pipeline.forward(torch.tensor([1.0]), 7)
    assert there.item() == ((1 * 3 + 1) * 4 + 1) * 5 + 1
    assert pipeline.inverse(there, 7).item() == 1
    assert [stage.steps for stage in stages] == [[7, -7]] * 3
    rows = torch.ones(2)
    assert Pipeline().forward(rows, 1) is rows
    assert Pipeline().inverse(rows, 1) is rows


def test_a_run_shares_a_seed_where_any_field_has_a_mask() -> None:
    masked, clipped = Pipeline([Fake(Kind.MASK)]), Pipeline([Fake(Kind.CLIP)])
    assert masked.keyed and not clipped.keyed
    assert Pipeline(clipped.stages, fields={"layer": masked}).keyed
    assert not Pipeline(clipped.stages, fields={"layer": Pipeline()}).keyed
