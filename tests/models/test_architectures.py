"""The networks of the papers, by their parameter counts and what they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models import validation
from securecluster.models.architectures import IMAGES

GRAY, COLOUR = (1, 28, 28), (3, 32, 32)
COUNTS = {
    ("mlp", (1, 8, 8)): 64 * 64 + 64 + 64 * 10 + 10,
    ("mlp-32", GRAY): 784 * 32 + 32 + 32 * 10 + 10,
    ("mlp-200", GRAY): 159_010,
    ("linear", GRAY): 7850,
    ("cnn-briggs", GRAY): 1_663_370,  # as McMahan et al. 2017 print it
    ("cnn-briggs", COLOUR): (75 * 32 + 32) + (800 * 64 + 64) + (64 * 64 * 512 + 512) + 5130,
    ("cnn-ali", COLOUR): 62_006,  # LeNet-5 on CIFAR-10
    ("cnn-ali", GRAY): 44_426,
    ("cnn-cifar", COLOUR): (75 * 32 + 32)
    + (800 * 64 + 64)
    + (4096 * 384 + 384)
    + (384 * 192 + 192)
    + 1930,
    ("resnet9", COLOUR): 6_573_130,  # the well-known 6.57 million
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "shape"), COUNTS, ids=str)
def test_parameter_counts(name: str, shape: tuple[int, ...]) -> None:
    flat = validation.build(name, shape, 10, Randomness(0))
    assert flat.dimension == COUNTS[name, shape]
    assert flat.module(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", [n for n in IMAGES if n.startswith(("cnn", "resnet"))])
@pytest.mark.parametrize("shape", [(64,), (1, 3, 3), (28, 28)], ids=str)
def test_convolutions_want_images(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=f"{name}.*try mlp") as caught:
        validation.build(name, shape, 10, Randomness(0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", IMAGES)
def test_no_network_averages_batch_statistics(name: str) -> None:
    module = IMAGES[name](COLOUR, 10)
    assert not list(module.buffers())
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


@pytest.mark.parametrize("name", [n for n in IMAGES if n.startswith(("mlp", "linear", "cnn"))])
def test_the_papers_networks_have_gradients_by_hand(name: str) -> None:
    assert validation.build(name, COLOUR, 10, Randomness(0)).stack is not None


def test_every_network_can_train_many_clients_at_once() -> None:
    assert all(validation.build(name, COLOUR, 10, Randomness(0)).together for name in IMAGES)


@pytest.mark.parametrize("name", [n for n in IMAGES if n.startswith(("cnn", "resnet"))])
@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((28, 28), r"samples of shape 28×28 have no axis of channels: add one with X\[:, None\]"),
        (
            (28, 28, 3),
            r"in samples of shape 28×28×3 channels seem to come last: move them with "
            r"np.moveaxis\(X, -1, 1\)",
        ),
        ((3, 2, 28), "images of at least .* pixels, not samples of shape 3×2×28"),
    ],
    ids=str,
)
def test_images_are_refused_for_the_right_reason(
    name: str, shape: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        validation.build(name, shape, 10, Randomness(0))
