"""Loading ResNet-18: with a small stand-in for torchvision everywhere, with torchvision itself
where it is installed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.protocols.oneshot.feature_maps import build
from securecluster.protocols.oneshot.resnet18 import DEVIATION, MEAN, SIDE, WEIGHTS

SEED = Randomness(0)


class Small(nn.Module):
    """A network with a head `fc`, a batch norm and an average pool, as a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, stride=8)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc: nn.Module = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.bn1(self.conv1(x)).relu().mean((2, 3)))
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A module torchvision.models whose resnet18 is small, and an empty cache; the place of its
    weights in there.
    """
    models = ModuleType("torchvision.models")
    url = "http://127.0.0.1:9/resnet18-small.pth"  # where nothing answers
    models.resnet18 = lambda weights: Small()  # type: ignore[attr-defined]
    models.ResNet18_Weights = SimpleNamespace(IMAGENET1K_V1=SimpleNamespace(url=url))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.delenv(WEIGHTS, raising=False)
    return tmp_path / "hub" / "checkpoints" / "resnet18-small.pth"


def drawn(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small().eval()


def images(n: int, channels: int) -> torch.Tensor:
    return torch.rand(n, channels, 16, 12, generator=torch.Generator().manual_seed(2))


def known(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Resized by Pillow, normalised, without the head."""
    resized = [
        [
            Image.fromarray(plane.numpy(), mode="F").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            for plane in one
        ]
        for one in x
    ]
    rows = torch.from_numpy(np.stack([[np.asarray(plane) for plane in one] for one in resized]))
    net.fc = nn.Identity()
    with torch.no_grad():
        out: torch.Tensor = net(
            (
                (rows - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
            ).float()
        )
    return out


@pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_of_a_named_file(
    suffix: str, stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net, path = drawn(0), tmp_path / f"own.{suffix}"
    (torch.save if suffix == "pth" else save_file)(dict(net.state_dict()), path)
    monkeypatch.setenv(WEIGHTS, str(path))
    found = build("resnet18", (3, 16, 12), SEED)
    x = images(70, 3)
    assert found.dimension == 4
    np.testing.assert_allclose(found(x).numpy(), known(net, x).numpy(), rtol=1e-3, atol=1e-4)
    grey = build("resnet18", (1, 16, 12), SEED)(x[:5, :1])
    np.testing.assert_allclose(
        grey.numpy(), known(drawn(0), x[:5, :1].repeat(1, 3, 1, 1)).numpy(), rtol=1e-3, atol=1e-4
    )
    other = tmp_path / "other.pth"
    torch.save(drawn(1).state_dict(), other)
    monkeypatch.setenv(WEIGHTS, str(other))
    assert build("resnet18", (3, 16, 12), SEED).describe() != found.describe()


def test_weights_of_the_cache(stand_in: Path) -> None:
    stand_in.parent.mkdir(parents=True)
    torch.save(drawn(0).state_dict(), stand_in)
    assert build("resnet18", (3, 16, 12), SEED).dimension == 4


def test_no_weights_and_no_connection(stand_in: Path) -> None:
    with pytest.raises(
        UsageError,
        match=f"not in torchvision's cache and could not be loaded .* name it in {WEIGHTS}",
    ):
        build("resnet18", (3, 16, 12), SEED)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a file of weights ran code",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read as weights"),
        ("torn", "cannot be read as weights"),
        (Trap(), "cannot be read as weights"),
        ([1, 2], "holds no state dict"),
        ({"conv1.weight": torch.zeros(4, 3, 7, 7)}, "not those of torchvision's resnet18"),
        ({**Small().state_dict(), "more": torch.zeros(1)}, "not those of torchvision's resnet18"),
    ],
)
def test_files_that_are_no_weights(
    content: Any, words: str, stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "own.pth"
    if content == "torn":
        torch.save(Small().state_dict(), path)
        path.write_bytes(path.read_bytes()[:1000])
    elif content is not None:
        torch.save(content, path)
    monkeypatch.setenv(WEIGHTS, str(path))
    with pytest.raises(UsageError, match=words):
        build("resnet18", (3, 16, 12), SEED)


def test_torchvision_is_missing_or_broken(
    monkeypatch: pytest.MonkeyPatch, stand_in: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchvision.models", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="pip install torchvision torch=="):
        build("resnet18", (3, 16, 12), SEED)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        UsageError, match="the build of torchvision that belongs to the installed torch"
    ):
        build("resnet18", (3, 16, 12), SEED)


@pytest.mark.parametrize("shape", [(2, 16, 12), (64,)])
def test_samples_that_are_no_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="images of one or three channels"):
        build("resnet18", shape, SEED)


def torchvision() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:  # it may be a build for another torch
        pytest.skip(f"torchvision cannot be imported: {error!r}")


def test_torchvisions_own_resnet18(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models, path = torchvision(), tmp_path / "weights.pth"
    torch.manual_seed(0)
    net = models.resnet18(weights=None).eval()
    torch.save(net.state_dict(), path)
    monkeypatch.setenv(WEIGHTS, str(path))
    found = build("resnet18", (3, 32, 32), SEED)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    ready = models.ResNet18_Weights.IMAGENET1K_V1.transforms(resize_size=SIDE)
    wide = torch.nn.functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    with torch.no_grad():
        body = nn.Sequential(*list(net.children())[:-1], nn.Flatten())
        exact = body(ready(wide))  # nothing is left to resize: torchvision normalises
    assert found.dimension == 512
    np.testing.assert_allclose(found(x).numpy(), exact.numpy(), rtol=1e-3, atol=1e-4)
