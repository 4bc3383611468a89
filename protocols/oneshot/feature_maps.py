"""Feature maps Φ: what a client's samples are described by before their Gram matrix is formed (Ali
& Arafa 2024, II-B).

Every client must use the same map, so a map is made from public things alone: a name, the run's
seed, a public data set, published weights.
"""

from __future__ import annotations

import copy
import hashlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from securecluster.clustering.eigenvectors import top
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import SOURCES, source
from securecluster.errors import UsageError, unknown
from securecluster.models.objectives import Language, Objective
from securecluster.protocols.oneshot.resnet18 import resnet18

if TYPE_CHECKING:
    from torch import Tensor, nn

    Map: TypeAlias = Callable[[Tensor], Tensor]

NAMES = ("identity", "pca", "dct", "conv", "resnet18")
DIMENSION = {"pca": 64, "dct": 16, "conv": 512}  # numbers per sample unless told otherwise (ours)
PUBLIC = 4000  # public samples that principal components are computed from (ours)
BATCH = 500  # samples mapped at once


@dataclass(frozen=True)
class Features:
    """A map Φ of samples (n, *shape) in [0, 1] to features (n, D) float32, on the samples' device.

    Args:
        dimension: D. description: what a configuration says of it, for JSON. batch: samples mapped
            at once.
    """

    name: str
    shape: tuple[int, ...]
    dimension: int
    function: Map
    description: Any
    batch: int = BATCH

    def __call__(self, x: Tensor, finite: bool = True) -> Tensor:
        """Φ(x), (n, D).

        Args:
            finite: whether a row that is not finite is refused. Under noise it counts as zeros
                later, since a refusal would be a release of its own.

        Raises:
            UsageError: samples of another shape, or a map of a user's own that fails or does not
                give a row of D for each.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise UsageError(
                f"the features {self.name} are made for samples of shape {_text(self.shape)}, not "
                f"{_text(x.shape[1:])}"
            )
        if not len(x):
            return torch.zeros(0, self.dimension, device=x.device)
        parts = torch.split(x, self.batch)
        # maps have float32 weights, also in runs in float64
        rows = torch.cat(
            [_checked(self.name, self.function, part.float(), self.dimension) for part in parts]
        )
        if finite:
            _check_finite(self.name, rows)
        return rows

    def describe(self) -> Any:
        """What a configuration says of it, so that clients with another map are refused."""
        return copy.deepcopy(self.description)  # those of named maps are kept and shared

    def agreed(self, description: Any) -> Features:
        """The same map.

        Raises:
            UsageError: the run's configuration describes another one.
        """
        if self.description != description:
            raise UsageError(
                "these features are not those by which the run compared its clients: give the same "
                "map, data or weights"
            )
        return self


def check(features: Any, public: str | None = None, dimension: int | None = None) -> None:
    """Refuse options that no data could make right; torch is not loaded for it.

    Raises:
        UsageError: an unknown name, a public data set that is missing, unknown or of no use, or a
            dimension that is none.
    """
    if not isinstance(features, str) and not callable(features):
        raise UsageError(
            f"features are one of {', '.join(NAMES)}, a callable or an nn.Module, not "
            f"{type(features).__name__}"
        )
    if isinstance(features, str) and features not in NAMES:
        raise unknown("features", features, NAMES)
    if features == "pca" and public is None:
        raise UsageError(
            "the features pca need public data of the same shape: name a data set as public, "
            "cifar100 for cifar10, say"
        )
    if public is not None and features != "pca":
        raise UsageError("public data serve the features pca alone: leave public out, or use pca")
    # what cannot be hashed may be asked for, too
    if public is not None and public not in tuple(SOURCES):
        raise unknown("public data", public, SOURCES)
    if dimension is not None and (not isinstance(features, str) or features not in DIMENSION):
        raise UsageError(
            f"components are chosen for the features {', '.join(DIMENSION)} alone: leave them out"
        )
    if dimension is not None and not (isinstance(dimension, Integral) and dimension >= 1):
        raise UsageError(f"components = {dimension!r} is not possible: it is a whole number from 1")


def check_objective(objective: Objective) -> None:
    """Raise UsageError for text: a Gram matrix of token numbers means nothing."""
    if isinstance(objective, Language):
        raise UsageError(
            "one-shot similarity compares samples that are numbers, and text is not: choose "
            "another protocol, cfl say"
        )


def build(
    features: str | Map | nn.Module,
    shape: tuple[int, ...],
    randomness: Randomness,
    public: str | None = None,
    dimension: int | None = None,
) -> Features:
    """The named map for samples of this shape, or a user's own, tried on three random samples.

    "identity" flattens; "pca" projects on the principal components of public samples; "dct" keeps
    an image's lowest frequencies, which needs no data at all; "conv" is an untrained network whose
    weights are drawn from the seed; "resnet18" is torchvision's, trained on ImageNet, up to its
    average pool (Ali & Arafa 2024, III).

    Args:
        public: name of a public data set, for pca. dimension: D, for pca, dct and conv (None:
            `DIMENSION`).

    Raises:
        UsageError: as in `check`; or samples that the map does not take, public data, packages or
            weights that are missing.
    """
    check(features, public, dimension)
    batch = BATCH
    if not isinstance(features, str):
        function, description = _own(features)
    elif features == "identity":
        function, description = (lambda x: x.flatten(1)), "identity"
    elif features == "pca":
        function, description = _pca(
            tuple(shape), randomness.seed, str(public), int(dimension or DIMENSION["pca"]), PUBLIC
        )
    elif features == "dct":
        function, description = _dct(tuple(shape), int(dimension or DIMENSION["dct"]))
    elif features == "conv":
        function, description = _conv(shape, randomness, int(dimension or DIMENSION["conv"]))
    else:
        function, description, batch = resnet18(shape)
    name = (
        features
        if isinstance(features, str)
        else getattr(features, "__name__", type(features).__name__)
    )
    found = _tried(name, function, shape)
    if description is None:
        description = {"callable": _place(features), "probe": _print(found)}
    return Features(name, tuple(shape), found.shape[1], function, description, batch)


# a run builds its map several times: for the server's facts, its clients, newcomers
@lru_cache(maxsize=4)
def _pca(
    shape: tuple[int, ...], seed: int, public: str, dimension: int, count: int
) -> tuple[Map, Any]:
    """Projection on the leading principal components of a seeded draw of public samples.

    The samples' own mean stays in (ours): G is about the origin, and much of what tells tasks apart
    is where their means lie.
    """
    given = source(public)
    if given.shape != shape:
        raise UsageError(
            f"the public data {public} have samples of shape {_text(given.shape)}, the clients' "
            f"have {_text(shape)}: name data of one shape"
        )
    draw = Randomness(seed).generator("features", "public").permutation(len(given.train.y))[:count]
    samples = torch.from_numpy(given.train.read(np.sort(draw))).flatten(1)
    if dimension > min(samples.shape):
        raise UsageError(
            f"{len(samples)} samples of {public} have at most {min(samples.shape)} principal "
            f"components, not {dimension}"
        )
    wide = samples.double()
    vectors = top(wide - wide.mean(0), dimension)[1].float()

    def function(x: Tensor) -> Tensor:
        return x.flatten(1) @ vectors.to(x.device).T

    return function, {
        "pca": public,
        "dimension": dimension,
        "samples": hashlib.sha256(samples.numpy().tobytes()).hexdigest(),
    }


def _dct(shape: tuple[int, ...], dimension: int) -> tuple[Map, Any]:
    """The lowest frequencies (u/H, v/W) of each channel's orthonormal DCT-II, by u²/H² + v²/W²
    (ours).

    A projection, so it makes no sample longer.
    """
    from scipy.fft import idctn

    if len(shape) != 3:
        raise UsageError(
            f"the features dct take images, not samples of shape {_text(shape)}: use identity or "
            "pca"
        )
    channels, height, width = shape
    if dimension > channels * height * width:
        raise UsageError(
            f"samples of shape {_text(shape)} have {channels * height * width} frequencies, not "
            f"{dimension}: ask for fewer"
        )
    order = sorted(
        np.ndindex(height, width, channels),
        key=lambda f: ((f[0] / height) ** 2 + (f[1] / width) ** 2, f),
    )[:dimension]
    waves = np.zeros((dimension, *shape))
    for k, (u, v, c) in enumerate(order):
        waves[k, c, u, v] = 1
    basis = torch.from_numpy(idctn(waves, axes=(2, 3), norm="ortho").reshape(dimension, -1)).float()

    def function(x: Tensor) -> Tensor:
        return x.flatten(1) @ basis.to(x.device).T

    return function, {"dct": dimension}


def _conv(shape: tuple[int, ...], randomness: Randomness, dimension: int) -> tuple[Map, Any]:
    """Two 3×3 convolutions with random weights, ReLU and pooling, averaged over the four quarters
    of the image (ours).

    `benchmarks.papers.oneshot_table1` and `benchmarks.tasks` tell how well it tells tasks apart,
    beside the pixels themselves.
    """
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UsageError(
            "the features conv take images of at least 4×4 pixels, not samples of shape "
            f"{_text(shape)}: use identity"
        )
    widths = (shape[0], 32, -(-dimension // 4))
    layers = [
        _layer(randomness, k, before, after) for k, (before, after) in enumerate(pairwise(widths))
    ]

    def function(x: Tensor) -> Tensor:
        (w1, b1), (w2, b2) = (tuple(part.to(x.device) for part in layer) for layer in layers)
        do = torch.nn.functional
        first = do.max_pool2d(do.conv2d(x - 0.5, w1, b1, padding=1).relu(), 2)
        out: Tensor = do.adaptive_avg_pool2d(do.conv2d(first, w2, b2, padding=1).relu(), 2).flatten(
            1
        )
        return out[:, :dimension]

    return function, {"conv": list(widths), "dimension": dimension}


def _layer(randomness: Randomness, k: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Weights (after, before, 3, 3) and biases (after,), uniform in ± 1/√fan-in."""
    draw, bound = randomness.generator("features", "conv", k), (9 * before) ** -0.5
    weight, bias = (
        draw.uniform(-bound, bound, (after, before, 3, 3)),
        draw.uniform(-bound, bound, after),
    )
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()


def _own(features: Map | nn.Module) -> tuple[Map, Any]:
    """A user's own map; of a module a copy in evaluation mode, described by its text and weights.

    It is given copies of samples: `x -= mean`, or a ReLU in place, would change what clients train
        on.
    """
    if not isinstance(features, torch.nn.Module):
        return (lambda x: features(x.clone())), None
    from securecluster.models.validation import describe

    try:
        module = copy.deepcopy(features).cpu().eval()
    except Exception as error:  # copying a user's object may raise anything
        raise UsageError(
            f"the features {type(features).__name__} cannot be copied: {_reason(error)}"
        ) from error
    return (lambda x: module.to(x.device)(x.clone())), describe(module)


def _tried(name: str, function: Map, shape: tuple[int, ...]) -> Tensor:
    """The features (3, D) of three random samples, which are always the same ones."""
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    found = _checked(name, function, x)
    _check_finite(name, found)
    again, alone = (_checked(name, function, part, found.shape[1]) for part in (x, x[:1]))
    near = 1e-3 * float(found.abs().max())
    if not torch.allclose(found, again, rtol=0, atol=near):
        raise UsageError(
            f"the features {name} differ from call to call: let them draw no random numbers and "
            "keep no state"
        )
    if not torch.allclose(found[:1], alone, rtol=0, atol=near):
        raise UsageError(
            f"the features {name} of a sample depend on the others of its batch: map each sample "
            "on its own"
        )
    return found


def _checked(name: str, function: Map, x: Tensor, dimension: int | None = None) -> Tensor:
    try:
        with torch.no_grad():
            found: Any = function(x)
    except UsageError:
        raise
    except Exception as error:  # a user's own map may raise anything
        raise UsageError(
            f"the features {name} do not take samples of shape {_text(x.shape[1:])}: "
            f"{_reason(error)}"
        ) from error
    if (
        not isinstance(found, torch.Tensor)
        or found.ndim != 2
        or len(found) != len(x)
        or not found.shape[1]
    ):
        what = _text(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise UsageError(
            f"the features {name} give {what} for {len(x)} samples: they must give one row of "
            "numbers for each"
        )
    if found.shape[1] != (dimension or found.shape[1]):
        raise UsageError(
            f"the features {name} give {dimension} numbers for a sample, then {found.shape[1]}: "
            "give equally many"
        )
    if found.is_complex():
        raise UsageError(f"the features {name} are complex: give real numbers")
    return found.detach().float()


def _check_finite(name: str, rows: Tensor) -> None:
    if not bool(rows.isfinite().all()):
        raise UsageError(
            f"the features {name} of some sample are not finite: mend the map, or the sample"
        )


def _place(features: Any) -> str:
    kind = features if hasattr(features, "__qualname__") else type(features)
    return f"{kind.__module__}.{kind.__qualname__}"


def _print(found: Tensor) -> list[str]:
    """A few digits of random projections of the probe's features, which tell maps apart but not
    machines that round differently.
    """
    draw = Randomness(0).generator("features", "probe").standard_normal((found.shape[1], 4))
    return [
        f"{value:.2e}"
        for value in (found.double().cpu() @ torch.from_numpy(draw)).flatten().tolist()
    ]


def _text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a single number"


def _reason(error: Exception) -> str:
    return (
        textwrap.shorten((str(error).splitlines() or [""])[0], 200, placeholder=" …")
        or type(error).__name__
    )
