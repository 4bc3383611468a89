"""Image sets from parquet files and from the hub: only what is dealt is decoded, and every mistake
is named.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster.data import Federation, Iid, Tasks, datasets
from securecluster.data import pools as pools_module
from securecluster.data.datasets import FOLDER, IMAGE_SETS, Source, source
from securecluster.errors import UsageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(0)


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


def as_bytes(x: np.ndarray) -> bytes:
    """The pixels that an image was made of."""
    return np.round(x * 255).astype(np.uint8).tobytes()


def write(
    path: Path,
    pixels: np.ndarray,
    image: str = "image",
    kind: str = "PNG",
    group: int = 7,
    **columns: Any,
) -> None:
    """A parquet file in the hub's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = pa.array(
        [{"bytes": encode(p, kind), "path": None} for p in pixels],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    pq.write_table(pa.table({image: cells, **columns}), path, row_group_size=group)


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Random images in two training files and a test file; their pixels."""
    train, test = (RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (60, 30))
    labels = np.arange(60) % 10
    write(tmp_path / "mnist" / "train-00000-of-00002.parquet", train[:25], label=labels[:25])
    write(tmp_path / "mnist" / "train-00001-of-00002.parquet", train[25:], label=labels[25:])
    write(tmp_path / "mnist" / "test-00000-of-00001.parquet", test, label=np.arange(30) % 10)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return {"train": train, "test": test}


def test_rows_are_read_in_the_order_asked_across_files_and_row_groups(
    mnist: dict[str, np.ndarray],
) -> None:
    rows = np.array([59, 0, 24, 25, 7, 7, 31, 0, 13])
    found = source("mnist")
    assert np.array_equal(
        found.train.read(rows), mnist["train"][rows][:, None].astype(np.float32) / np.float32(255)
    )
    assert found.train.read(rows).dtype == np.float32
    assert found.train.y.tolist() == [k % 10 for k in range(60)]
    assert found.test is not None
    assert np.array_equal(found.test.read(np.arange(30)) * 255, mnist["test"][:, None])
    assert found.train.read(rows[:0]).shape == (0, 1, 28, 28) and found.train.owners is None


def test_only_dealt_rows_are_decoded_and_labels_decode_none(
    mnist: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    real = pools_module.opened
    monkeypatch.setattr(
        pools_module, "opened", lambda where, blob: (decoded.append(where), real(where, blob))[1]
    )
    assert len(source("mnist").train.y) == 60 and not decoded
    federation = Federation.simulate("mnist", scenario=Iid(), clients=3, samples=4, seed=0)
    assert len(decoded) == len(set(decoded)) == 3 * (4 + 1)
    known = {p.tobytes() for p in mnist["train"]}
    assert all(as_bytes(x) in known for s in federation.shards for x in s.x)
    decoded.clear()
    Federation.simulate("mnist", scenario=Iid(overlap=True), clients=5, samples=50, seed=0)
    assert len(decoded) == len(set(decoded)) <= 90


def test_held_out_samples_come_from_the_official_test_rows(mnist: dict[str, np.ndarray]) -> None:
    test = {p.tobytes() for p in mnist["test"]}
    federation = Federation.simulate("mnist", scenario=Tasks(), clients=4, samples=8, seed=0)
    assert all(as_bytes(x) in test for s in federation.shards for x in s.x_test)
    assert {len(s.y_test) for s in federation.shards} == {2}
    one, two = (Federation.simulate("mnist", clients=4, seed=0).digest() for _ in range(2))
    assert one == two


def test_colour_and_grey_images_in_any_encoding_become_the_sets_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    pixels = RNG.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    for split in ("train", "test"):
        path = tmp_path / "cifar10" / f"{split}-00000-of-00001.parquet"
        write(path, pixels, "img", "WEBP", label=np.arange(12) % 10)
        path = tmp_path / "cifar100" / f"{split}.parquet"
        labels = {"fine_label": np.arange(12) + 60, "coarse_label": np.arange(12)}
        write(path, pixels[..., 0], "img", **labels)
    colour = source("cifar10").train.read(np.array([3, 1]))
    assert np.array_equal(
        np.round(colour * 255).astype(np.uint8), pixels[[3, 1]].transpose(0, 3, 1, 2)
    )
    assert source("cifar100").train.y.tolist() == list(range(60, 72))
    grey = source("cifar100").train.read(np.array([5]))
    assert grey.shape == (1, 3, 32, 32)
    assert all(np.array_equal(np.round(plane * 255), pixels[5, :, :, 0]) for plane in grey[0])


PIXELS = np.zeros((4, 28, 28), np.uint8)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def overwrite_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4000] = b"\x00" * 3900
    path.write_bytes(bytes(data))


def replace_images(path: Path, images: Any) -> None:
    """Keep the labels and put other cells in the place of the images."""
    labels = pq.read_table(path)["label"]
    pq.write_table(pa.table({"image": images, "label": labels}), path)


def put_rubbish(path: Path) -> None:
    replace_images(path, [{"bytes": b"\x89PNG\r\n\x1a\nrubbish", "path": None}] * 30)


def remove_bytes(path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    replace_images(path, pa.array([{"bytes": None, "path": "x.png"}] * 30, kind))


SPOIL: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "corrupt": overwrite_bytes,
    "text": lambda path: path.write_text("no parquet"),
    "gone": lambda path: path.unlink(),
    "no label": lambda path: write(path, PIXELS, lable=np.arange(4)),
    "null label": lambda path: write(path, PIXELS, label=pa.array([1, None, 2, 3])),
    "text label": lambda path: write(path, PIXELS, label=["a", "b", "c", "d"]),
    "large label": lambda path: write(path, PIXELS, label=[1, 2, 10, 3]),
    "small images": lambda path: write(path, PIXELS[:, :14], label=np.arange(4)),
    "no image": lambda path: replace_images(path, np.arange(30)),
    "undecodable": put_rubbish,
    "null image": remove_bytes,
}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated", "test-00000-of-00001.parquet is no parquet file, or not a whole one"),
        ("text", "is no parquet file, or not a whole one"),
        ("corrupt", "is no parquet file, or not a whole one|cannot be decoded"),
        ("gone", "no mnist/test-.*.parquet lies.*unset SECURECLUSTER_DATA"),
        ("no label", "unknown column of test-00000-of-00001.parquet 'label': did you mean 'lable'"),
        ("null label", "column 'label' of .* has 1 empty cells"),
        ("text label", "holds .*string, not class numbers"),
        ("large label", "label outside 0 … 9.*ylecun/mnist"),
        ("small images", "has 28 × 14 pixels, the first one 28 × 28|28 × 28"),
        ("no image", "has no images where they should be, but int64"),
        ("undecodable", "image .* cannot be decoded"),
        ("null image", "image .* cannot be decoded"),
    ],
)
def test_files_that_cannot_be_used_are_named_in_one_sentence(
    what: str, words: str, mnist: dict[str, np.ndarray], tmp_path: Path
) -> None:
    SPOIL[what](tmp_path / "mnist" / "test-00000-of-00001.parquet")
    with pytest.raises(UsageError, match=words) as caught:
        Federation.simulate("mnist", scenario=Iid(), clients=2, seed=0)
    assert "\n" not in str(caught.value)


def test_a_set_that_the_folder_lacks_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "nowhere"))
    for name, spec in IMAGE_SETS.items():
        with pytest.raises(
            UsageError, match=f"no {name}/train.*put {spec.hub} there, or unset SECURECLUSTER_DATA"
        ):
            source(name)
    with pytest.raises(UsageError, match="did you mean 'fashion_mnist'"):
        source("fashion-mnist")


@pytest.mark.parametrize("module", ["pyarrow", "PIL", "datasets"])
def test_a_missing_package_is_named_with_the_extra(
    module: str, mnist: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "datasets":
        monkeypatch.delenv(FOLDER)
    for name in (module, "PIL.Image", "pyarrow.parquet") if module != "datasets" else (module,):
        if name.startswith(module):
            monkeypatch.setitem(sys.modules, name, None)
    package = {"PIL": "Pillow"}.get(module, module)
    with pytest.raises(UsageError, match=f"needs {package}: pip install {package}"):
        Federation.simulate("mnist", scenario=Iid(), clients=2, seed=0)


def hub_copy(folder: Path) -> None:
    """Put the small mnist where `datasets` finds both splits of a local repository."""
    (folder / "hub").mkdir()
    for path in (folder / "mnist").iterdir():
        shutil.copy(path, folder / "hub" / path.name)


HUB = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from dataclasses import replace
from securecluster.data import Federation, Iid, pools
from securecluster.data import datasets
from securecluster.errors import UsageError
folder = sys.argv[1]
present, absent = folder + "/hub", folder + "/nothing"
for name, hub in (("mnist", present), ("femnist", present), ("cifar10", absent)):
    datasets.IMAGE_SETS[name] = replace(datasets.IMAGE_SETS[name], hub=hub)
found = datasets.source("mnist")
decoded = []
real = pools.opened
pools.opened = lambda where, blob: (decoded.append(where), real(where, blob))[1]
y = found.train.y.tolist()
none = len(decoded)
pixels = np.round(found.train.read(np.array([40, 3, 3])) * 255).astype(int).tolist()
said = []
for name in ("femnist", "cifar10"):
    try:
        datasets.source(name)
    except UsageError as error:
        said.append(str(error))
digest = Federation.simulate("mnist", scenario=Iid(), clients=3, seed=0).digest()
told = {"y": y, "decoded": [none, len(decoded)], "pixels": pixels, "said": said}
print(json.dumps(told | {"digest": digest}))
"""


@pytest.mark.exhaustive
def test_the_hub_is_read_through_datasets(
    mnist: dict[str, np.ndarray], tmp_path: Path, read_hub: Callable[[str, Path], Any]
) -> None:
    hub_copy(tmp_path)
    from_files = Federation.simulate("mnist", scenario=Iid(), clients=3, seed=0).digest()
    result = read_hub(HUB, tmp_path)
    assert result["y"] == [k % 10 for k in range(60)]
    assert result["decoded"][0] == 0
    assert np.array_equal(np.array(result["pixels"])[:, 0], mnist["train"][[40, 3, 3]])
    assert "unknown column of" in result["said"][0] and "'character'" in result["said"][0]
    assert "cifar10 could not be loaded from the hub as" in result["said"][1]
    assert "SECURECLUSTER_DATA" in result["said"][1]
    assert result["digest"] == from_files


def test_a_source_of_ones_own_is_dealt_like_a_known_one(
    monkeypatch: pytest.MonkeyPatch, mnist: dict[str, np.ndarray]
) -> None:
    found: Source = replace(source("mnist"), name="mine")
    federation = Federation.simulate(found, scenario=Iid(), clients=2, samples=5, seed=0)
    assert federation.data == "mine"
    known = Federation.simulate("mnist", scenario=Iid(), clients=2, samples=5, seed=0)
    assert federation.digest() == known.digest()
    assert datasets.default_scenario("femnist") == "natural"
    assert datasets.default_scenario("mnist") == "label-swap"
