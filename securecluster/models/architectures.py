"""Network architectures by name, from the papers that this toolkit implements.

None has batch norm, whose statistics cannot be averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from securecluster.errors import UsageError, unknown
from securecluster.models.objectives import Objective
from securecluster.models.sequence_architectures import (
    lstm_chars,
    lstm_chars_256,
    lstm_trajectory,
    lstm_words,
)

Shape = tuple[int, ...]
Make = Callable[[Shape, int], nn.Module]


def mlp(shape: Shape, classes: int, hidden: int = 64) -> nn.Module:
    """Return a perceptron with one hidden layer and ReLU.

    Args:
        shape: shape of a sample, which is flattened.
        classes: number of outputs.
        hidden: width of the hidden layer.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(_features(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def linear(shape: Shape, classes: int) -> nn.Module:
    """Return multinomial logistic regression.

    Args:
        shape: shape of a sample, which is flattened.
        classes: number of outputs.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(_features(shape), classes))


def cnn_briggs(shape: Shape, classes: int) -> nn.Module:
    """Return the CNN of McMahan et al. 2017 and Briggs et al. 2020, IV-A.

    Two 5×5 convolutions of 32 and 64 channels that keep the size, each with 2×2 max-pooling, and a
    dense layer of 512: 1,663,370 parameters on 28×28 images and 10 classes.

    Args:
        shape: (channels, height, width), at least 4×4 pixels.
        classes: number of outputs.
    """
    channels, height, width = _image("cnn-briggs", shape, 4)
    # Each of the two poolings halves height and width.
    pixels = (height // 4) * (width // 4)
    return nn.Sequential(
        *_conv_block(channels, 32, padding=2),
        *_conv_block(32, 64, padding=2),
        nn.Flatten(),
        *_dense_block(64 * pixels, 512),
        nn.Linear(512, classes),
    )


def cnn_ali(shape: Shape, classes: int) -> nn.Module:
    """Return the CNN of Ali & Arafa 2024, IV.

    Two 5×5 convolutions of 6 and 16 channels with 2×2 max-pooling, and dense layers of 120 and 84.
    The paper gives kernels, pools and dense layers; the channels are those of LeNet-5, whose dense
    layers these are.

    Args:
        shape: (channels, height, width), at least 16×16 pixels.
        classes: number of outputs.
    """
    channels, height, width = _image("cnn-ali", shape, 16)
    # Convolutions without padding lose four pixels of each side.
    pixels = _after_lenet(height) * _after_lenet(width)
    return nn.Sequential(
        *_conv_block(channels, 6),
        *_conv_block(6, 16),
        nn.Flatten(),
        *_dense_block(16 * pixels, 120),
        *_dense_block(120, 84),
        nn.Linear(84, classes),
    )


def cnn_cifar(shape: Shape, classes: int) -> nn.Module:
    """Return a CNN of five layers for CIFAR.

    5×5 convolutions of 32 and 64 channels with 2×2 max-pooling, and dense layers of 384 and 192.
    Sattler et al. 2019, VI-D, train "a 5-layer CNN" without its widths: these are not in the paper.

    Args:
        shape: (channels, height, width), at least 4×4 pixels.
        classes: number of outputs.
    """
    channels, height, width = _image("cnn-cifar", shape, 4)
    pixels = (height // 4) * (width // 4)
    return nn.Sequential(
        *_conv_block(channels, 32, padding=2),
        *_conv_block(32, 64, padding=2),
        nn.Flatten(),
        *_dense_block(64 * pixels, 384),
        *_dense_block(384, 192),
        nn.Linear(192, classes),
    )


class Residual(nn.Module):
    """A residual block, x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + f(x) of x (n, channels, height, width)."""
        out: torch.Tensor = x + self.inner(x)
        return out


def resnet9(shape: Shape, classes: int) -> nn.Module:
    """Return ResNet-9, which Vardhan et al. 2024 train on CIFAR-10.

    Group norm of 8 groups stands in place of batch norm.

    Args:
        shape: (channels, height, width), at least 8×8 pixels.
        classes: number of outputs.
    """
    channels, _, _ = _image("resnet9", shape, 8)
    return nn.Sequential(
        _norm_block(channels, 64),
        _norm_block(64, 128, pool=True),
        _residual(128),
        _norm_block(128, 256, pool=True),
        _norm_block(256, 512, pool=True),
        _residual(512),
        # One number a channel, whatever the image's size.
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


IMAGES: dict[str, Make] = {
    "mlp": mlp,
    "mlp-32": partial(mlp, hidden=32),
    "mlp-200": partial(mlp, hidden=200),  # as in Vardhan et al. 2024
    "linear": linear,
    "cnn-briggs": cnn_briggs,
    "cnn-ali": cnn_ali,
    "cnn-cifar": cnn_cifar,
    "resnet9": resnet9,
}
DENSE = ("mlp", "mlp-32", "mlp-200", "linear")  # networks whose first layer sees a whole image
NETWORKS: dict[str, dict[str, Make]] = {  # by kind of objective, the default first
    "classification": IMAGES,
    "regression": IMAGES,
    "multilabel": IMAGES,
    "binary": IMAGES,
    "trajectory": {"lstm-trajectory": lstm_trajectory, **{name: IMAGES[name] for name in DENSE}},
    "language": {
        "lstm-words": lstm_words,
        "lstm-chars": lstm_chars,
        "lstm-chars-256": lstm_chars_256,
    },
}
AUTO = "auto"
# default learning rates by optimizer (not in the paper) of networks without one in RATES
RATE = {"sgd": 0.2, "adam": 0.001}
RATES = {
    "sgd": {"lstm-words": 3.0, "lstm-chars": 4.0, "lstm-chars-256": 4.0, "lstm-trajectory": 0.1},
    "adam": {"lstm-trajectory": 0.003},
}
# default of DENSE with sgd, on images of large norm (`benchmarks.clusters.rates`); convolutions
# learn little at it
BRIGHT_RATE = 0.03
# default of regressions with sgd, whose loss is steeper than a cross-entropy
NUMBERS_RATE = 0.05
CHARACTERS = 256  # tokens up to which text is taken for characters


def names() -> tuple[str, ...]:
    """Return the names of all networks, each once."""
    unique: dict[str, None] = {}
    for networks in NETWORKS.values():
        unique.update(dict.fromkeys(networks))
    return tuple(unique)


def chosen(name: str, objective: Objective, classes: int) -> str:
    """Resolve "auto" to the default network for the data.

    Args:
        name: a network's name, which is returned as it is, or "auto".
        objective: objective of the data.
        classes: number of labels, tokens or coordinates.
    """
    if name != AUTO:
        return name
    if objective.kind == "language" and classes <= CHARACTERS:
        return "lstm-chars"
    return next(iter(NETWORKS[objective.kind]))


def network(name: str, objective: Objective, classes: int) -> Make:
    """Return the function that makes a network.

    Args:
        name: a network's name, or "auto".
        objective: objective of the data.
        classes: number of labels, tokens or coordinates.

    Returns:
        A function of a sample's shape and the number of outputs.

    Raises:
        UsageError: an unknown name, or a network for another objective.
    """
    name = chosen(name, objective, classes)
    all_names = names()
    if name not in all_names:
        raise unknown("model", name, (AUTO, *all_names))
    suitable = NETWORKS[objective.kind]
    if name not in suitable:
        suits = [objective_kind for objective_kind in NETWORKS if name in NETWORKS[objective_kind]]
        choices = ", ".join(suitable)
        raise UsageError(
            f"the model {name} is made for {', '.join(suits)}, "
            f"and these data are for {objective.kind}: "
            f"choose {choices}, or auto"
        )
    return suitable[name]


def rate(
    name: str | nn.Module, objective: Objective, classes: int, optimizer: str, bright: bool = False
) -> float:
    """Return the default learning rate of a network (not in the paper).

    Args:
        name: a network's name, "auto", or a user's module.
        objective: objective of the data.
        classes: number of labels, tokens or coordinates.
        optimizer: "sgd" or "adam".
        bright: True for the images of a known set, or their negatives, whose norms are too large
            for the usual rate.
    """
    resolved = ""  # a user's module has no rate of its own
    if isinstance(name, str):
        resolved = chosen(name, objective, classes)
    if bright and optimizer == "sgd" and _is_dense(resolved or name):
        return BRIGHT_RATE
    if objective.kind == "regression" and optimizer == "sgd":
        return NUMBERS_RATE
    return RATES[optimizer].get(resolved, RATE[optimizer])


def _is_dense(model: str | nn.Module) -> bool:
    """Return True if the first layer of a network, or of a user's module, sees a whole image."""
    if isinstance(model, str):
        return model in DENSE
    return not _convolves(model)


def _convolves(module: Any) -> bool:
    """Return True if a module has a convolution, whose kernels see few pixels at once."""
    convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d
    return any(isinstance(layer, convolutions) for layer in module.modules())


def _features(shape: Shape) -> int:
    """Return the numbers of a sample."""
    return int(torch.Size(shape).numel())


def _after_lenet(side: int) -> int:
    """Return the pixels of a side after two 5×5 convolutions without padding, each with pooling."""
    pooled = (side - 4) // 2
    return (pooled - 4) // 2


def _conv_block(channels: int, filters: int, padding: int = 0) -> list[nn.Module]:
    """Return a 5×5 convolution, ReLU and 2×2 max-pooling."""
    return [nn.Conv2d(channels, filters, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _norm_block(channels: int, filters: int, pool: bool = False) -> nn.Sequential:
    """Return a 3×3 convolution with group norm and ReLU, optionally 2×2 max-pooling."""
    layers = [
        # Group norm has a shift of its own, so a bias would do nothing.
        nn.Conv2d(channels, filters, 3, padding=1, bias=False),
        nn.GroupNorm(8, filters),
        nn.ReLU(),
    ]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _residual(channels: int) -> nn.Module:
    """Return a residual block of two convolutions."""
    first = _norm_block(channels, channels)
    second = _norm_block(channels, channels)
    return Residual(nn.Sequential(first, second))


def _dense_block(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a dense layer and ReLU."""
    return [nn.Linear(inputs, outputs), nn.ReLU()]


def _image(name: str, shape: Shape, minimum: int) -> tuple[int, int, int]:
    """Return channels, height and width of images that a network takes.

    Args:
        name: the network's name, for the message.
        shape: shape of a sample.
        minimum: smallest height and width that the network takes.

    Raises:
        UsageError: samples that are no images, have channels last, or are too small.
    """
    printed = "×".join(map(str, shape))
    if len(shape) == 2:
        raise UsageError(
            f"the model {name} takes images (channels, height, width), and samples of shape "
            f"{printed} have no axis of channels: add one with X[:, None], or try mlp"
        )
    if len(shape) == 3 and shape[-1] in (1, 3) and shape[0] >= minimum:
        raise UsageError(
            f"the model {name} takes images (channels, height, width), and in samples of shape "
            f"{printed} channels"
            " seem to come last: move them with np.moveaxis(X, -1, 1), or try mlp"
        )
    if len(shape) != 3 or min(shape[1:]) < minimum:
        raise UsageError(
            f"the model {name} takes images of at least {minimum}×{minimum} pixels, not samples of "
            f"shape {printed}: try mlp"
        )
    channels, height, width = shape
    return channels, height, width
