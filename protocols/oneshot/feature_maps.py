"""Feature maps Φ, applied to a client's samples before their Gram matrix (Ali & Arafa 2024, II-B).

All clients must use the same map, so a map is determined by public information: a name, the run's
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
from securecluster.data.datasets import SOURCES, source
from securecluster.errors import text_of
from securecluster.protocols import authoring as fl
from securecluster.protocols.oneshot.resnet18 import resnet18

if TYPE_CHECKING:
    from torch import Tensor, nn

    Map: TypeAlias = Callable[[Tensor], Tensor]

NAMES = ("identity", "pca", "dct", "conv", "resnet18")
DIMENSION = {"pca": 64, "dct": 16, "conv": 512}  # default D (not in the paper)
PUBLIC = 4000  # public samples for principal components (not in the paper)
BATCH = 500  # samples mapped at once


@dataclass(frozen=True)
class Features:
    """A map Φ of samples in [0, 1] to features, which are float32 on the samples' device.

    Args:
        name: of the map.
        shape: of a sample.
        dimension: D, the numbers of a sample's features.
        function: the map of (n, *shape) to (n, D).
        description: of the map, in JSON for configurations.
        batch: samples mapped at once.
    """

    name: str
    shape: tuple[int, ...]
    dimension: int
    function: Map
    description: Any
    batch: int = BATCH

    def __call__(self, x: Tensor, finite: bool = True) -> Tensor:
        """Return Φ(x).

        Args:
            x: (n, *shape).
            finite: whether a row that is not finite is refused. Under noise it counts as zeros
                later, since a refusal would be a release without noise.

        Returns:
            (n, D) float32.

        Raises:
            UsageError: samples of another shape, or a user's own map that fails or does not return
                D numbers for each sample.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise fl.UsageError(
                f"the features {self.name} are made for samples of shape {_text(self.shape)}, not "
                f"{_text(x.shape[1:])}"
            )
        if not len(x):
            return torch.zeros(0, self.dimension, device=x.device)
        batches = []
        for samples in torch.split(x, self.batch):
            # maps have float32 weights, also in runs in float64
            batches.append(_checked(self.name, self.function, samples.float(), self.dimension))
        rows = torch.cat(batches)
        if finite:
            _check_finite(self.name, rows)
        return rows

    def describe(self) -> Any:
        """Return the map's description, so that clients with another map are refused."""
        return copy.deepcopy(self.description)  # descriptions of named maps are cached and shared

    def agreed(self, description: Any) -> Features:
        """Return this map if it is the run's.

        Args:
            description: of the map in the run's configuration.

        Raises:
            UsageError: the configuration describes another map.
        """
        if self.description != description:
            raise fl.UsageError(
                "these features are not those by which the run compared its clients: give the same "
                "map, data or weights"
            )
        return self


def check(features: Any, public: str | None = None, dimension: int | None = None) -> None:
    """Check options that are invalid for any data; torch is not imported.

    Args:
        features: the map's name, or a user's own map.
        public: name of a public data set, or None.
        dimension: D, or None.

    Raises:
        UsageError: an unknown name; a public data set that is missing, unknown or not used; or an
            invalid dimension.
    """
    if not isinstance(features, str) and not callable(features):
        raise fl.UsageError(
            f"features are one of {', '.join(NAMES)}, a callable or an nn.Module, not "
            f"{type(features).__name__}"
        )
    if isinstance(features, str) and features not in NAMES:
        raise fl.unknown("features", features, NAMES)
    _check_public(features, public)
    _check_dimension(features, dimension)


def _check_public(features: Any, public: str | None) -> None:
    """Raise UsageError unless a public data set is given for pca, and for pca alone."""
    if features == "pca" and public is None:
        raise fl.UsageError(
            "the features pca need public data of the same shape: name a data set as public, "
            "cifar100 for cifar10, say"
        )
    if public is None:
        return
    if features != "pca":
        raise fl.UsageError(
            "public data serve the features pca alone: leave public out, or use pca"
        )
    # a tuple, since a user may give something that cannot be hashed
    if public not in tuple(SOURCES):
        raise fl.unknown("public data", public, SOURCES)


def _check_dimension(features: Any, dimension: int | None) -> None:
    """Raise UsageError for a dimension of a map that has none to choose, or one below 1."""
    if dimension is None:
        return
    if not isinstance(features, str) or features not in DIMENSION:
        raise fl.UsageError(
            f"components are chosen for the features {', '.join(DIMENSION)} alone: leave them out"
        )
    if not (isinstance(dimension, Integral) and dimension >= 1):
        raise fl.UsageError(
            f"components = {dimension!r} is not possible: it is a whole number from 1"
        )


def assumptions(features: object, public: str | None) -> list[str]:
    """Return what ε assumes of the feature map.

    Args:
        features: the name of the map, or a user's own.
        public: the public data set of principal components.

    Returns:
        One sentence, or none for maps that no data determine.
    """
    if features == "pca":
        return [
            f"the features are principal components of {public}, taken as public: clients' samples "
            "that are among these are not covered"
        ]
    if isinstance(features, str):
        return []
    return [
        "features of your own are taken as made without any client's data, one sample at a time"
    ]


def build(
    features: str | Map | nn.Module,
    shape: tuple[int, ...],
    randomness: fl.Randomness,
    public: str | None = None,
    dimension: int | None = None,
) -> Features:
    """Return a feature map for samples of a shape, after a trial on three random samples.

    "identity" flattens samples. "pca" projects on the principal components of public samples. "dct"
    is an image's lowest frequencies, which needs no data. "conv" is an untrained network whose
    weights are drawn from the seed. "resnet18" is torchvision's network, trained on ImageNet, up to
    its average pool (Ali & Arafa 2024, III).

    Args:
        features: the map's name, or a user's own map.
        shape: of a sample.
        randomness: of the run.
        public: name of a public data set, for pca.
        dimension: D, for pca, dct and conv; None means `DIMENSION`.

    Raises:
        UsageError: as in `check`; or samples that the map does not accept, or public data, packages
            or weights that are missing.
    """
    check(features, public, dimension)
    batch = BATCH
    if isinstance(features, str):
        name = features
        components = int(dimension or DIMENSION.get(name, 0))
    else:
        name = getattr(features, "__name__", type(features).__name__)

    if not isinstance(features, str):
        function, description = _own(features)
    elif features == "identity":
        function, description = (lambda x: x.flatten(1)), "identity"
    elif features == "pca":
        function, description = _pca(tuple(shape), randomness.seed, str(public), components, PUBLIC)
    elif features == "dct":
        function, description = _dct(tuple(shape), components)
    elif features == "conv":
        function, description = _conv(shape, randomness, components)
    else:
        function, description, batch = resnet18(shape)

    trial = _tried(name, function, shape)
    if description is None:
        # a callable has no weights to describe, so its values on the trial samples stand for it
        description = {"callable": _qualified_name(features), "probe": _print(trial)}
    return Features(name, tuple(shape), trial.shape[1], function, description, batch)


# a run builds its map several times: for the server's facts, its clients, newcomers
@lru_cache(maxsize=4)
def _pca(
    shape: tuple[int, ...], seed: int, public: str, dimension: int, count: int
) -> tuple[Map, Any]:
    """Return the projection on the leading principal components of public samples.

    Args:
        shape: of a sample.
        seed: of the run, by which public samples are drawn.
        public: name of the data set.
        dimension: D.
        count: number of public samples.

    Returns:
        The map and its description.

    Raises:
        UsageError: samples of another shape, or too few for so many components.
    """
    data = source(public)
    if data.shape != shape:
        raise fl.UsageError(
            f"the public data {public} have samples of shape {_text(data.shape)}, the clients' "
            f"have {_text(shape)}: name data of one shape"
        )
    generator = fl.Randomness(seed).generator("features", "public")
    drawn = generator.permutation(len(data.train.y))[:count]
    samples = torch.from_numpy(data.train.read(np.sort(drawn))).flatten(1)
    if dimension > min(samples.shape):
        raise fl.UsageError(
            f"{len(samples)} samples of {public} have at most {min(samples.shape)} principal "
            f"components, not {dimension}"
        )
    # centred for the components only: their directions are those of the largest variance
    wide = samples.double()
    _, components = top(wide - wide.mean(0), dimension)
    components = components.float()

    def function(x: Tensor) -> Tensor:
        # Not centred (not in the paper): G is about the origin, and tasks differ to a large extent
        # by their means.
        return x.flatten(1) @ components.to(x.device).T

    description = {
        "pca": public,
        "dimension": dimension,
        "samples": hashlib.sha256(samples.numpy().tobytes()).hexdigest(),
    }
    return function, description


def _dct(shape: tuple[int, ...], dimension: int) -> tuple[Map, Any]:
    """Return the lowest frequencies of each channel's orthonormal DCT-II (not in the paper).

    Frequencies (u/H, v/W) are ordered by u²/H² + v²/W². The map is a projection, so it increases no
    sample's norm.

    Args:
        shape: (channels, H, W) of an image.
        dimension: D.

    Returns:
        The map and its description.

    Raises:
        UsageError: samples that are no images, or have fewer frequencies.
    """
    from scipy.fft import idctn

    if len(shape) != 3:
        raise fl.UsageError(
            f"the features dct take images, not samples of shape {_text(shape)}: use identity or "
            "pca"
        )
    channels, height, width = shape
    frequencies = channels * height * width
    if dimension > frequencies:
        raise fl.UsageError(
            f"samples of shape {_text(shape)} have {frequencies} frequencies, not "
            f"{dimension}: ask for fewer"
        )

    def by_frequency(index: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        u, v, _ = index
        return (u / height) ** 2 + (v / width) ** 2, index

    order = sorted(np.ndindex(height, width, channels), key=by_frequency)[:dimension]
    spectra = np.zeros((dimension, *shape))
    for k, (u, v, channel) in enumerate(order):
        spectra[k, channel, u, v] = 1
    waves = idctn(spectra, axes=(2, 3), norm="ortho")
    basis = torch.from_numpy(waves.reshape(dimension, -1)).float()

    def function(x: Tensor) -> Tensor:
        return x.flatten(1) @ basis.to(x.device).T

    return function, {"dct": dimension}


def _conv(shape: tuple[int, ...], randomness: fl.Randomness, dimension: int) -> tuple[Map, Any]:
    """Return an untrained network of two convolutions (not in the paper).

    They are 3×3 convolutions with random weights, ReLU and pooling, averaged over the four quarters
    of the image. `benchmarks.papers.oneshot.table1` and `benchmarks.clusters.tasks` measure how
    well it separates tasks, compared with the pixels themselves.

    Args:
        shape: (channels, H, W) of an image.
        randomness: of the run.
        dimension: D.

    Returns:
        The map and its description.

    Raises:
        UsageError: samples that are no images, or too small ones.
    """
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise fl.UsageError(
            "the features conv take images of at least 4×4 pixels, not samples of shape "
            f"{_text(shape)}: use identity"
        )
    # four numbers a channel, one for each quarter, so D / 4 channels rounded up
    widths = (shape[0], 32, -(-dimension // 4))
    layers = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(_layer(randomness, number, inputs, outputs))

    def function(x: Tensor) -> Tensor:
        ops = torch.nn.functional
        (weight1, bias1), (weight2, bias2) = layers
        device = x.device
        hidden = ops.conv2d(x - 0.5, weight1.to(device), bias1.to(device), padding=1)
        hidden = ops.max_pool2d(hidden.relu(), 2)
        output = ops.conv2d(hidden, weight2.to(device), bias2.to(device), padding=1)
        quarters: Tensor = ops.adaptive_avg_pool2d(output.relu(), 2).flatten(1)
        return quarters[:, :dimension]

    return function, {"conv": list(widths), "dimension": dimension}


def _layer(
    randomness: fl.Randomness, number: int, inputs: int, outputs: int
) -> tuple[Tensor, Tensor]:
    """Return the weights of a convolution, uniform in ± 1/√fan-in.

    Args:
        randomness: of the run.
        number: of the layer.
        inputs: channels.
        outputs: channels.

    Returns:
        Weights (outputs, inputs, 3, 3) and biases (outputs,).
    """
    generator = randomness.generator("features", "conv", number)
    bound = (9 * inputs) ** -0.5
    weight = generator.uniform(-bound, bound, (outputs, inputs, 3, 3))
    bias = generator.uniform(-bound, bound, outputs)
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()


def _own(features: Map | nn.Module) -> tuple[Map, Any]:
    """Return a user's own map and its description.

    A module is copied in evaluation mode, and described by its text and weights; a callable has no
    description. Both receive copies of samples: `x -= mean`, or a ReLU in place, would otherwise
    change the data that clients train on.

    Raises:
        UsageError: a module that cannot be copied.
    """
    if not isinstance(features, torch.nn.Module):
        return (lambda x: features(x.clone())), None
    from securecluster.models.validation import describe

    try:
        module = copy.deepcopy(features).cpu().eval()
    except Exception as error:  # copying a user's object may raise anything
        raise fl.UsageError(
            f"the features {type(features).__name__} cannot be copied: {_reason(error)}"
        ) from error
    return (lambda x: module.to(x.device)(x.clone())), describe(module)


def _tried(name: str, function: Map, shape: tuple[int, ...]) -> Tensor:
    """Return the features of three random samples, which are always the same ones.

    Args:
        name: of the map, for errors.
        function: the map.
        shape: of a sample.

    Returns:
        (3, D)

    Raises:
        UsageError: the map draws random numbers, has a state, or mixes samples.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, *shape, generator=generator, dtype=torch.float32)
    features = _checked(name, function, x)
    _check_finite(name, features)
    again = _checked(name, function, x, features.shape[1])
    single = _checked(name, function, x[:1], features.shape[1])
    # products of other sizes may be rounded differently
    tolerance = 1e-3 * float(features.abs().max())
    if not torch.allclose(features, again, rtol=0, atol=tolerance):
        raise fl.UsageError(
            f"the features {name} differ from call to call: let them draw no random numbers and "
            "keep no state"
        )
    if not torch.allclose(features[:1], single, rtol=0, atol=tolerance):
        raise fl.UsageError(
            f"the features {name} of a sample depend on the others of its batch: map each sample "
            "on its own"
        )
    return features


def _checked(name: str, function: Map, x: Tensor, dimension: int | None = None) -> Tensor:
    """Apply a map, and check the shape and type of its result.

    Args:
        name: of the map, for errors.
        function: the map.
        x: (n, *shape) samples.
        dimension: D; None accepts any.

    Returns:
        (n, D) float32.

    Raises:
        UsageError: the map fails, or returns something else.
    """
    try:
        with torch.no_grad():
            features: Any = function(x)
    except fl.UsageError:
        raise
    except Exception as error:  # a user's own map may raise anything
        raise fl.UsageError(
            f"the features {name} do not take samples of shape {_text(x.shape[1:])}: "
            f"{_reason(error)}"
        ) from error
    if not _is_matrix(features, len(x)):
        description = type(features).__name__
        if isinstance(features, torch.Tensor):
            description = _text(features.shape)
        raise fl.UsageError(
            f"the features {name} give {description} for {len(x)} samples: they must give one row "
            "of numbers for each"
        )
    if dimension and features.shape[1] != dimension:
        raise fl.UsageError(
            f"the features {name} give {dimension} numbers for a sample, then {features.shape[1]}: "
            "give equally many"
        )
    if features.is_complex():
        raise fl.UsageError(f"the features {name} are complex: give real numbers")
    rows: Tensor = features.detach().float()
    return rows


def _is_matrix(features: Any, rows: int) -> bool:
    """Return whether features are a tensor with so many rows, and at least one column."""
    if not isinstance(features, torch.Tensor) or features.ndim != 2:
        return False
    return len(features) == rows and features.shape[1] > 0


def _check_finite(name: str, rows: Tensor) -> None:
    """Raise UsageError if a number is not finite."""
    if not bool(rows.isfinite().all()):
        raise fl.UsageError(
            f"the features {name} of some sample are not finite: mend the map, or the sample"
        )


def _qualified_name(features: Any) -> str:
    """Return module and name of a function, or of an object's class."""
    definition = features if hasattr(features, "__qualname__") else type(features)
    return f"{definition.__module__}.{definition.__qualname__}"


def _print(features: Tensor) -> list[str]:
    """Return a fingerprint of the trial samples' features.

    It has a few digits of random projections, which differ between maps but not between machines
    that round differently.
    """
    generator = fl.Randomness(0).generator("features", "probe")
    directions = torch.from_numpy(generator.standard_normal((features.shape[1], 4)))
    projections = features.double().cpu() @ directions
    return [f"{value:.2e}" for value in projections.flatten().tolist()]


def _text(shape: tuple[int, ...]) -> str:
    """Return a shape as text for errors, such as 3×32×32."""
    return "×".join(map(str, shape)) or "a single number"


def _reason(error: Exception) -> str:
    """Return the first line of an error's text, shortened, or its type."""
    lines = text_of(error).splitlines()
    if not lines:
        return type(error).__name__
    return textwrap.shorten(lines[0], 200, placeholder=" …") or type(error).__name__
