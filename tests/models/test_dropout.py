"""Dropout from keys: the right share, repeatable, and nobody's business but the client's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from securecluster.errors import UsageError
from securecluster.models.dropout import SeededDropout, seeded, with_seeded_dropout
from securecluster.models.validation import prepare_module


def drawn(layer: SeededDropout, x: torch.Tensor, key: int) -> torch.Tensor:
    with seeded([layer], torch.tensor(key)):
        out: torch.Tensor = layer(x)
    return out


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_and_the_scale(p: float) -> None:
    out = drawn(SeededDropout(p, 0), torch.ones(100, 1000), 5)
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - p))}
    dropped = int((out == 0).sum())
    assert stats.binomtest(dropped, 100_000, p).pvalue > 1e-4


def splitmix(z: int) -> int:
    """SplitMix64's output function on Python's whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("p", [0.2, 0.5, 1 / 3])
def test_the_draws_are_those_of_splitmix(p: float) -> None:
    key, number, call = 2**62 - 5, 3, 1
    state = splitmix((key + (number << 20) + call) % 2**64)
    states = [(state + place) * 0x9E3779B97F4A7C15 % 2**64 for place in range(600)]
    drawn_numbers = [(splitmix(own) >> 40) / 2**24 for own in states]
    expected = torch.tensor([u >= np.float32(p) for u in drawn_numbers]) / (1 - p)
    assert torch.equal(drawn(SeededDropout(p, number), torch.ones(20, 30), key).flatten(), expected)


def test_masks_look_independent_over_keys_samples_and_places() -> None:
    kept = [drawn(SeededDropout(0.5, 0), torch.ones(20, 50), key) for key in range(1000)]
    masks = torch.stack(kept).flatten(1) > 0
    counts = masks.double().numpy()
    assert 1e-4 < stats.chi2.cdf(((counts.sum(0) - 500) ** 2 / 250).sum(), 1000) < 1 - 1e-4
    correlation = np.corrcoef(counts[:, :200].T)[np.triu_indices(200, 1)]
    assert abs(correlation.mean()) < 1e-3 and abs(correlation.std() - 1 / np.sqrt(1000)) < 1e-3


def test_a_key_repeats_and_another_key_or_layer_or_call_does_not() -> None:
    x, layer = torch.ones(10, 50), SeededDropout(0.5, 0)
    first = drawn(layer, x, 7)
    assert torch.equal(first, drawn(layer, x, 7))
    assert not torch.equal(first, drawn(layer, x, 8))
    assert not torch.equal(first, drawn(SeededDropout(0.5, 1), x, 7))
    with seeded([layer], torch.tensor(7)):
        assert not torch.equal(layer(x), layer(x))


def test_without_a_key_it_does_nothing() -> None:
    layer, x = SeededDropout(0.5, 0), torch.randn(4, 6)
    assert torch.equal(layer(x), x)
    drawn(layer, x, 1)
    assert torch.equal(layer(x), x)


def test_padding_of_the_mini_batch_changes_nobodys_mask() -> None:
    layer = SeededDropout(0.5, 0)
    assert torch.equal(drawn(layer, torch.ones(5, 8), 3), drawn(layer, torch.ones(9, 8), 3)[:5])


def test_whole_channels() -> None:
    out = drawn(SeededDropout(0.5, 0, channels=True), torch.ones(6, 8, 3, 3), 2)
    assert all(len(plane.unique()) == 1 for sample in out for plane in sample)
    assert len(out.unique()) == 2


def test_vmap_draws_each_client_its_own() -> None:
    layer, x = SeededDropout(0.5, 0), torch.ones(3, 4, 10)

    def one(own: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        with seeded([layer], key):
            return layer(own)  # type: ignore[no-any-return]

    together = torch.func.vmap(one)(x, torch.tensor([1, 2, 1]))
    assert torch.equal(together[0], drawn(layer, x[0], 1))
    assert torch.equal(together[1], drawn(layer, x[1], 2))
    assert torch.equal(together[0], together[2]) and not torch.equal(together[0], together[1])


def test_layers_are_replaced_in_a_copy_also_deep_inside() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.2), nn.Dropout2d(0.3)))
    changed = with_seeded_dropout(module)
    layers = [part for part in changed.modules() if isinstance(part, SeededDropout)]
    assert [(layer.p, layer.channels) for layer in layers] == [(0.2, False), (0.3, True)]
    assert layers[0].number != layers[1].number
    assert any(isinstance(part, nn.Dropout) for part in module.modules())


def test_a_layer_under_two_names_is_replaced_in_both_places() -> None:
    layer = nn.Dropout(0.5)
    changed = with_seeded_dropout(nn.Sequential(layer, nn.Linear(4, 4), layer))
    assert [type(part) for part in changed] == [SeededDropout, nn.Linear, SeededDropout]


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.2), nn.Dropout(1.0)], ids=["alpha", "all"])
def test_what_cannot_be_drawn_is_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(UsageError, match=type(layer).__name__):
        with_seeded_dropout(nn.Sequential(layer))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


def test_draws_of_its_own_are_refused_with_the_replacement() -> None:
    with pytest.raises(UsageError, match=r"Functional.*nn\.Dropout layers"):
        prepare_module(Functional(), (4,), 3)
