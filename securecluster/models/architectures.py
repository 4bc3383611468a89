"""The networks by name, from the papers this toolkit implements. No batch norm anywhere: its
statistics cannot be averaged.
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


def mlp(shape: Shape, classes: int, hidden: int = 64) -> nn.Module:
    """Input-`hidden`-`classes` with ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(_features(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def linear(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_features(shape), classes))


def cnn_briggs(shape: Shape, classes: int) -> nn.Module:
    """Two 5×5 convolutions of 32 and 64 channels that keep the size, each with 2×2 max-pooling, and
    a dense layer of 512.

    As McMahan et al. 2017 and Briggs et al. 2020, IV-A: 1,663,370 parameters on 28×28 images and 10
    classes.
    """
    channels, height, width = _image("cnn-briggs", shape, 4)
    convolutions = [*_block(channels, 32, padding=2), *_block(32, 64, padding=2)]
    return nn.Sequential(
        *convolutions,
        nn.Flatten(),
        *_dense(64 * (height // 4) * (width // 4), 512),
        nn.Linear(512, classes),
    )


def cnn_ali(shape: Shape, classes: int) -> nn.Module:
    """Two 5×5 convolutions of 6 and 16 channels with 2×2 max-pooling, and dense layers of 120 and
    84 (Ali & Arafa 2024, IV).

    The paper gives kernels, pools and dense layers; the channels are those of LeNet-5, whose dense
    layers these are.
    """
    channels, height, width = _image("cnn-ali", shape, 16)
    size = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    convolutions = [*_block(channels, 6), *_block(6, 16)]
    return nn.Sequential(
        *convolutions,
        nn.Flatten(),
        *_dense(16 * size, 120),
        *_dense(120, 84),
        nn.Linear(84, classes),
    )


def cnn_cifar(shape: Shape, classes: int) -> nn.Module:
    """Five layers for CIFAR: 5×5 convolutions of 32 and 64 channels with 2×2 max-pooling, dense
    layers of 384 and 192, the classes.

    Sattler et al. 2019, VI-D, train "a 5-layer CNN" without printing its widths: these are ours.
    """
    channels, height, width = _image("cnn-cifar", shape, 4)
    convolutions = [*_block(channels, 32, padding=2), *_block(32, 64, padding=2)]
    dense = [*_dense(64 * (height // 4) * (width // 4), 384), *_dense(384, 192)]
    return nn.Sequential(*convolutions, nn.Flatten(), *dense, nn.Linear(192, classes))


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, channels, height, width)."""
        out: torch.Tensor = x + self.inner(x)
        return out


def resnet9(shape: Shape, classes: int) -> nn.Module:
    """ResNet-9 (Vardhan et al. 2024 train it on CIFAR-10), with group norm of 8 groups in place of
    batch norm.
    """
    channels, _, _ = _image("resnet9", shape, 8)

    def block(before: int, after: int, pool: bool = False) -> nn.Sequential:
        layers = [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.GroupNorm(8, after),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))

    def residual(width: int) -> nn.Module:
        return Residual(nn.Sequential(block(width, width), block(width, width)))

    body = [
        block(channels, 64),
        block(64, 128, pool=True),
        residual(128),
        block(128, 256, pool=True),
        block(256, 512, pool=True),
    ]
    return nn.Sequential(
        *body, residual(512), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, classes)
    )


Make = Callable[[Shape, int], nn.Module]
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
NETWORKS: dict[str, dict[str, Make]] = {  # by kind of objective, the default first
    "classification": IMAGES,
    "trajectory": {
        "lstm-trajectory": lstm_trajectory,
        **{name: IMAGES[name] for name in ("mlp", "mlp-32", "mlp-200", "linear")},
    },
    "language": {
        "lstm-words": lstm_words,
        "lstm-chars": lstm_chars,
        "lstm-chars-256": lstm_chars_256,
    },
}
AUTO = "auto"
RATE = {"sgd": 0.2, "adam": 0.001}  # learning rates (ours) of networks that have none of their own
RATES = {
    "sgd": {"lstm-words": 3.0, "lstm-chars": 4.0, "lstm-chars-256": 4.0, "lstm-trajectory": 0.1},
    "adam": {"lstm-trajectory": 0.003},
}
DENSE = ("mlp", "mlp-32", "mlp-200", "linear")  # networks whose first layer sees a whole image
# theirs with sgd, on images of large norm (`benchmarks.rates`); convolutions learn little at it
BRIGHT_RATE = 0.03
CHARACTERS = 256  # tokens up to which text is taken for characters


def names() -> tuple[str, ...]:
    """All networks."""
    return tuple(dict.fromkeys(name for kind in NETWORKS.values() for name in kind))


def chosen(name: str, objective: Objective, classes: int) -> str:
    """The network that a name stands for; "auto" is what suits the data."""
    if name == AUTO and objective.kind == "language" and classes <= CHARACTERS:
        return "lstm-chars"
    return next(iter(NETWORKS[objective.kind])) if name == AUTO else name


def network(name: str, objective: Objective, classes: int) -> Make:
    """The named network.

    Raises:
        UsageError: an unknown name, or a network for another objective.
    """
    known, own = names(), NETWORKS[objective.kind]
    name = chosen(name, objective, classes)
    if name not in known:
        raise unknown("model", name, (AUTO, *known))
    if name not in own:
        kinds = ", ".join(kind for kind, networks in NETWORKS.items() if name in networks)
        raise UsageError(
            f"the model {name} is made for {kinds}, and these data are for {objective.kind}: "
            f"choose {', '.join(own)}, or auto"
        )
    return own[name]


def rate(
    name: str | nn.Module,
    objective: Objective,
    classes: int,
    optimizer: str,
    bright: bool = False,
) -> float:
    """Return the learning rate a network is trained with where none is given (ours).

    Args:
        bright: whether the images are those of a known set, or their negatives, whose norms are too
            large for the usual rate.
    """
    own = chosen(name, objective, classes) if isinstance(name, str) else ""
    if bright and optimizer == "sgd" and (own in DENSE if own else not _convolves(name)):
        return BRIGHT_RATE
    return RATES[optimizer].get(own, RATE[optimizer])


def _convolves(module: Any) -> bool:
    """Return whether a module has a convolution, whose kernels see few pixels at once."""
    return any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in module.modules())


def _features(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _block(before: int, after: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _dense(before: int, after: int) -> list[nn.Module]:
    return [nn.Linear(before, after), nn.ReLU()]


def _image(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    """Return channels, height and width of an image that a network can take."""
    printed = "×".join(map(str, shape))
    if len(shape) == 2:
        raise UsageError(
            f"the model {name} takes images (channels, height, width), and samples of shape "
            f"{printed} have no axis of channels: add one with X[:, None], or try mlp"
        )
    if len(shape) == 3 and shape[-1] in (1, 3) and shape[0] >= least:
        raise UsageError(
            f"the model {name} takes images (channels, height, width), and in samples of shape "
            f"{printed} channels"
            " seem to come last: move them with np.moveaxis(X, -1, 1), or try mlp"
        )
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UsageError(
            f"the model {name} takes images of at least {least}×{least} pixels, not samples of "
            f"shape {printed}: try mlp"
        )
    channels, height, width = shape
    return channels, height, width
