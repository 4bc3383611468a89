"""Which layers are common."""

from __future__ import annotations

import pytest
import torch

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models.validation import build
from securecluster.protocols.oneshot.hierarchical_averaging import common_layers


@pytest.mark.parametrize(
    ("model", "shape", "names", "numbers"),
    [
        ("mlp-32", (1, 28, 28), "auto", 784 * 32 + 32),
        ("linear", (1, 28, 28), "auto", 0),
        ("linear", (1, 28, 28), "1", 7850),
        ("cnn-ali", (3, 32, 32), "auto", 3 * 6 * 25 + 6 + 6 * 16 * 25 + 16),
        ("cnn-ali", (3, 32, 32), "0", 3 * 6 * 25 + 6),
        ("cnn-ali", (3, 32, 32), "0, 3", 3 * 6 * 25 + 6 + 6 * 16 * 25 + 16),
        ("cnn-ali", (3, 32, 32), "none", 0),
    ],
)
def test_they_are_named_by_the_model_or_the_user(
    model: str, shape: tuple[int, ...], names: str, numbers: int
) -> None:
    assert common_layers(build(model, shape, 10, Randomness(0)), names) == numbers


@pytest.mark.exhaustive
def test_all_of_a_residual_network_but_its_last_layer_is_common() -> None:
    flat = build("resnet9", (3, 32, 32), 10, Randomness(0))
    found = common_layers(flat, "auto")
    # the norm after the last convolution, and the dense layer
    assert flat.dimension - found == 512 * 2 + 512 * 10 + 10


def test_names_of_parts_mean_all_layers_in_them_and_only_the_first_can_be_common() -> None:
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    net = torch.nn.Sequential()
    net.add_module("body", body)
    net.add_module("head", torch.nn.Linear(3, 2))
    flat = build(net, (4,), 2, Randomness(0))
    assert common_layers(flat, "body") == 4 * 3 + 3 + 3 * 3 + 3
    assert common_layers(flat, "body.1") == common_layers(flat, "auto") == 4 * 3 + 3
    for wrong in ("head", "body.2", "bod", "", "body.1,head"):
        with pytest.raises(UsageError, match=r"they are body\.1, body\.2, head"):
            common_layers(flat, wrong)
