"""ResNet-18 as a feature map, with ImageNet weights, up to its average pool.

The network is torchvision's (Ali & Arafa 2024, Section III).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "SECURECLUSTER_WEIGHTS"
SIDE = 224  # pixels of the images that the weights were trained on
# mean and standard deviation of the three channels, from torchvision's transforms for these weights
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
BATCH = 64  # images mapped at once


def resnet18(shape: tuple[int, ...]) -> tuple[Callable[[Tensor], Tensor], Any, int]:
    """Return ResNet-18 as a map of images to features.

    Images are resized to 224×224 without cropping (not in the paper, which does not say), and
    normalised as the weights expect. Grey images are repeated to three channels.

    Args:
        shape: (1 or 3, h, w) of a sample in [0, 1].

    Returns:
        A function from (n, *shape) to (n, 512), its description for a configuration, and the number
        of images to map at once.

    Raises:
        UsageError: samples that are no images; torchvision or the weights are missing, or do not
            fit.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise fl.UsageError(
            "the features resnet18 take images of one or three channels, not samples of shape "
            f"{'×'.join(map(str, shape))}"
        )
    models = _torchvision()
    state = weights(models)
    module = models.resnet18(weights=None)
    try:
        module.load_state_dict(state, strict=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        source = os.environ.get(WEIGHTS) or "torchvision's cache"
        raise fl.UsageError(
            f"the weights in {source} are not those of torchvision's resnet18: name the file of "
            f"these in {WEIGHTS}"
        ) from error
    module.fc = torch.nn.Identity()  # the classifier; its input is the average pool's output
    description = {"resnet18": digest(state), "side": SIDE}
    return _map(module.eval()), description, BATCH


def weights(models: Any) -> Mapping[str, Tensor]:
    """Return the state dict of ResNet-18.

    It is read from the file that SECURECLUSTER_WEIGHTS names, otherwise from torchvision's cache or
    server.

    Args:
        models: the module `torchvision.models`.

    Raises:
        UsageError: a file that cannot be read, or weights that are neither in the cache nor on the
            server.
    """
    path = os.environ.get(WEIGHTS)
    if path:
        return _read(Path(path))
    url = models.ResNet18_Weights.IMAGENET1K_V1.url
    try:
        state: Mapping[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except Exception as error:
        # errors of a server, a file system and an unpickler have no common base class
        raise fl.UsageError(
            "ResNet-18's ImageNet weights are not in torchvision's cache and could not be loaded "
            f"from {url} ({type(error).__name__}): "
            f"check the connection, or download the file and name it in {WEIGHTS}"
        ) from error
    return state


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names and values of a state dict, in its order."""
    sha256 = hashlib.sha256()
    for name, value in state.items():
        flat = value.detach().cpu().contiguous().reshape(-1)
        sha256.update(name.encode())
        sha256.update(flat.view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def _torchvision() -> Any:
    """Return the module `torchvision.models`.

    Raises:
        UsageError: torchvision is not installed, or does not fit torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except ImportError:
        installed = torch.__version__.partition("+")[0]
        raise fl.UsageError(
            "the features resnet18 need torchvision: pip install torchvision "
            f"torch=={installed}, since another torch may replace yours without the last word"
        ) from None
    except Exception as error:
        # a build for another torch fails with a RuntimeError of torch
        raise fl.UsageError(
            f"torchvision cannot be imported ({type(error).__name__}), so the features resnet18 "
            "cannot be used: install the build of torchvision that belongs to the installed torch"
        ) from error


def _read(path: Path) -> Mapping[str, Tensor]:
    """Return the state dict in a file of safetensors, or of torch.save.

    Raises:
        UsageError: the file cannot be read, or contains no state dict.
    """
    try:
        if path.suffix == ".safetensors":
            safetensors: Any = importlib.import_module("safetensors.torch")
            content = safetensors.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # errors of safetensors, an unpickler and a file system have no common base class
        raise fl.UsageError(
            f"{WEIGHTS} is {path}, which cannot be read as weights ({type(error).__name__}): name "
            "a whole file"
        ) from error
    if not _is_state_dict(content):
        raise fl.UsageError(
            f"{WEIGHTS} is {path}, which holds no state dict: name a file of weights by name"
        )
    state: Mapping[str, Tensor] = content
    return state


def _is_state_dict(content: Any) -> bool:
    """Return whether the content of a file is a mapping to tensors."""
    if not isinstance(content, Mapping):
        return False
    return all(isinstance(value, torch.Tensor) for value in content.values())


def _map(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function that prepares images and applies the network."""

    def function(x: Tensor) -> Tensor:
        network = module.to(x.device)
        mean = torch.tensor(MEAN, device=x.device).view(1, 3, 1, 1)
        deviation = torch.tensor(DEVIATION, device=x.device).view(1, 3, 1, 1)
        resized = torch.nn.functional.interpolate(
            x.expand(-1, 3, -1, -1), size=(SIDE, SIDE), mode="bilinear", antialias=True
        )
        features: Tensor = network((resized - mean) / deviation)
        return features

    return function
