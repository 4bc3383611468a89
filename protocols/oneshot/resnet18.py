"""ResNet-18 as a feature map: torchvision's network with ImageNet weights, up to its average pool
(Ali & Arafa 2024, III).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "SECURECLUSTER_WEIGHTS"
SIDE = 224  # pixels of the images that the weights were trained on
# of their channels, as torchvision's own transforms for these weights
MEAN, DEVIATION = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)
BATCH = 64  # images mapped at once


def resnet18(shape: tuple[int, ...]) -> tuple[Callable[[Tensor], Tensor], Any, int]:
    """Map of images (n, 1 or 3, h, w) in [0, 1] to (n, 512), what a configuration says of it, and
    images mapped at once.

    Images are resized to 224×224 (ours: the paper does not say; nothing is cropped) and normalised
    as the weights expect; grey ones are repeated to three channels.

    Raises:
        UsageError: samples that are no images; torchvision or the weights are missing, or do not
            fit.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UsageError(
            "the features resnet18 take images of one or three channels, not samples of shape "
            f"{'×'.join(map(str, shape))}"
        )
    models = _torchvision()
    state = weights(models)
    module = models.resnet18(weights=None)
    try:
        module.load_state_dict(state, strict=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        where = os.environ.get(WEIGHTS) or "torchvision's cache"
        raise UsageError(
            f"the weights in {where} are not those of torchvision's resnet18: name the file of "
            f"these in {WEIGHTS}"
        ) from error
    module.fc = torch.nn.Identity()
    return _map(module.eval()), {"resnet18": digest(state), "side": SIDE}, BATCH


def weights(models: Any) -> Mapping[str, Tensor]:
    """The state dict in the file that SECURECLUSTER_WEIGHTS names, else torchvision's own, from its
    cache or its server.

    Raises:
        UsageError: a file that cannot be read, or weights that are neither in the cache nor to be
            had.
    """
    given = os.environ.get(WEIGHTS)
    if given:
        return _read(Path(given))
    url = models.ResNet18_Weights.IMAGENET1K_V1.url
    try:
        found: Mapping[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except (
        Exception
    ) as error:  # a server's, a file system's and an unpickler's errors have no common base
        raise UsageError(
            "ResNet-18's ImageNet weights are not in torchvision's cache and could not be loaded "
            f"from {url} ({type(error).__name__}): "
            f"check the connection, or download the file and name it in {WEIGHTS}"
        ) from error
    return found


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and values of a state dict."""
    sum256 = hashlib.sha256()
    for name, value in state.items():
        sum256.update(
            name.encode()
            + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return sum256.hexdigest()


def _torchvision() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except ImportError:
        raise UsageError(
            "the features resnet18 need torchvision: pip install 'securecluster[vision]'"
        ) from None
    except Exception as error:  # a build for another torch fails with a RuntimeError of torch's
        raise UsageError(
            f"torchvision cannot be imported ({type(error).__name__}), so the features resnet18 "
            "cannot be used: install the build of torchvision that belongs to the installed torch"
        ) from error


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            load: Any = importlib.import_module("safetensors.torch").load_file
            state = load(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # safetensors', an unpickler's and a file system's errors have no common base
        raise UsageError(
            f"{WEIGHTS} is {path}, which cannot be read as weights ({type(error).__name__}): name "
            "a whole file"
        ) from error
    if not isinstance(state, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise UsageError(
            f"{WEIGHTS} is {path}, which holds no state dict: name a file of weights by name"
        )
    return state


def _map(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        net = module.to(x.device)
        wide = torch.nn.functional.interpolate(
            x.expand(-1, 3, -1, -1), size=(SIDE, SIDE), mode="bilinear", antialias=True
        )
        mean, deviation = (
            torch.tensor(part, device=x.device).view(1, 3, 1, 1) for part in (MEAN, DEVIATION)
        )
        out: Tensor = net((wide - mean) / deviation)
        return out

    return function
