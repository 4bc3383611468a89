"""The real sets against what was published with them; skipped where they are not at hand."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from securecluster.data import Federation, Tasks
from securecluster.data.datasets import IMAGE_SETS, image_set, source
from securecluster.data.text import CHARACTERS

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

# images of each digit in MNIST
TRAINED = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
TESTED = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
FIRST = {  # published with the data
    "mnist": (60_000, [5, 0, 4, 1, 9], 10_000, [7, 2, 1, 0, 4]),
    "fashion_mnist": (60_000, [9, 0, 0, 3, 0], 10_000, [9, 2, 1, 1, 6]),
    "cifar10": (50_000, [6, 9, 9, 4, 1], 10_000, [3, 8, 8, 0, 6]),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_real_sets_have_their_published_labels(name: str, real_data: Path) -> None:
    found, (train, first, test, first_test) = source(name), FIRST[name]
    assert found.test is not None and (len(found.train.y), len(found.test.y)) == (train, test)
    assert found.train.y[:5].tolist() == first and found.test.y[:5].tolist() == first_test
    if name == "mnist":
        assert np.bincount(found.train.y).tolist() == TRAINED
        assert np.bincount(found.test.y).tolist() == TESTED
    else:
        assert set(np.bincount(found.train.y).tolist()) == {train // 10}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", IMAGE_SETS)
def test_real_images_are_what_pillow_decodes(name: str, real_data: Path) -> None:
    if not (real_data / name).is_dir():
        pytest.skip(f"{name} is not in {real_data}")
    found, spec = image_set(name), IMAGE_SETS[name]
    rows = [len(found.train.y) - 1, 3, 1234, 3]
    cells = pa.concat_tables(
        [pq.read_table(p, columns=[spec.image]) for p in sorted((real_data / name).glob("train-*"))]
    )[spec.image]
    for x, row in zip(found.train.read(np.array(rows)), rows, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(cells[row].as_py()["bytes"])))
        expected = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        assert x.shape == found.shape
        assert np.array_equal(np.round(x * 255).astype(np.uint8), expected)
        assert np.abs(x - expected / 255).max() < 1e-7


def names_of(path: Path, column: str) -> list[str]:
    """The class names in the parquet metadata."""
    features = json.loads(pq.read_schema(path).metadata[b"huggingface"])["info"]["features"]
    return list(features[column]["names"])


def test_tasks_of_the_real_sets_are_the_papers(real_data: Path) -> None:
    def words(name: str, column: str) -> list[set[str]]:
        names = names_of(next((real_data / name).glob("train-*")), column)
        return [{names[k].strip() for k in task.labels} for task in IMAGE_SETS[name].tasks]

    assert words("cifar10", "label") == [
        {"airplane", "automobile", "ship", "truck"},
        {"bird", "cat", "deer", "dog", "frog", "horse"},
    ]
    assert words("fashion_mnist", "label")[1:] == [{"Sandal", "Sneaker", "Ankle boot"}, {"Bag"}]
    digits, upper, lower = words("femnist", "character")
    assert all(w.isdigit() for w in digits)
    assert all(w.isupper() for w in upper)
    assert all(w.islower() for w in lower)
    table = pq.read_table(
        next((real_data / "cifar100").glob("train-*")), columns=["fine_label", "coarse_label"]
    )
    coarse = dict(
        zip(table["fine_label"].to_pylist(), table["coarse_label"].to_pylist(), strict=True)
    )
    names = names_of(next((real_data / "cifar100").glob("train-*")), "coarse_label")
    vehicles, rest = IMAGE_SETS["cifar100"].tasks
    assert {names[coarse[k]] for k in vehicles.labels} == {"vehicles_1", "vehicles_2"}
    assert len(vehicles.labels) == 10
    assert not {names[coarse[k]] for k in rest.labels} & {"vehicles_1", "vehicles_2"}


@pytest.mark.parametrize("name", ["digits", *IMAGE_SETS])
def test_tasks_share_out_all_labels(name: str) -> None:
    found = source(name) if name == "digits" else IMAGE_SETS[name]
    labels = Counter(label for task in found.tasks for label in task.labels)
    assert labels == Counter(range(found.classes))


def test_fashion_mnist_is_dealt_to_ten_users_as_in_the_paper(real_data: Path) -> None:
    federation = Federation.simulate(
        "fashion_mnist", scenario=Tasks(), clients=10, samples=60, seed=0
    )
    assert federation.truth is not None and np.bincount(federation.truth).tolist() == [5, 3, 2]
    totals = [
        sum(len(s.y) for s, t in zip(federation.shards, federation.truth, strict=True) if t == task)
        for task in range(3)
    ]
    assert totals == [300, 150, 50]


def test_femnists_writers_are_its_clients(real_data: Path) -> None:
    found = source("femnist")
    assert found.train.owners is not None and found.test is None
    writers = Counter(found.train.owners.tolist())
    assert len(writers) == 100
    assert (min(writers.values()), max(writers.values())) == (88, 183)
    assert len(found.train.y) == 16_238
    federation = Federation.simulate("femnist", clients=3, seed=0)
    assert federation.scenario == "natural"
    assert federation.classes == 62
    assert federation.shape == (1, 28, 28)
    for name, shard in zip(federation.names, federation.shards, strict=True):
        assert len(shard.y) + len(shard.y_test) == writers[name]
        assert len(shard.y_test) == writers[name] // 5


def need(real_data: Path, folder: str) -> Path:
    """The folder of a set; the test is skipped where it is not at hand."""
    if not (real_data / folder).is_dir():
        pytest.skip(f"{folder} is not in {real_data}")
    return real_data / folder


def test_the_traces_are_as_their_readme_says(real_data: Path) -> None:
    """125,359 samples of 400 users in 1,376 legs, each leg without a gap: so many windows fit."""
    folder = need(real_data, "most_mobility")
    found = source("mobility")
    traces = pq.read_table(folder / "traces.parquet", columns=["user_id", "leg"])
    legs = Counter(zip(traces["user_id"].to_pylist(), traces["leg"].to_pylist(), strict=True))
    assert len(legs) == 1376 and sum(legs.values()) == 125_359
    assert len(found.train.y) == sum(max(0, n - 10) for n in legs.values())
    x = found.train.read(np.arange(len(found.train.y)))
    assert -1e-4 < x.min() < 0 < x.max() < 1
    assert found.train.owners is not None
    assert found.train.groups is not None
    steps = np.linalg.norm((found.train.y - x[:, -1]) * (10_000, 6_200), axis=1)
    assert steps.max() < 340  # "no step in the kept traces is faster than 34 m/s"
    groups = dict(zip(found.train.owners.tolist(), found.train.groups.tolist(), strict=True))
    assert Counter(groups.values()) == {"3to1": 131, "1to2": 99, "2to1": 98, "1to1": 72}


def test_every_user_and_role_can_take_part(real_data: Path) -> None:
    for folder in ("most_mobility", "shakespeare"):
        need(real_data, folder)
    for name, known in (("mobility", 400), ("shakespeare", 609)):
        federation = Federation.simulate(name, clients=known, seed=0)
        assert len(federation) == known
        assert min(len(s.y_test) for s in federation.shards) >= 1
        assert federation.scenario == "natural"
        sizes = Counter(source(name).train.owners)  # type: ignore[arg-type]
        gap = source(name).train.gap or 0
        for owner, shard in zip(federation.names, federation.shards, strict=True):
            held = sizes[owner] // 5
            assert (len(shard.y), len(shard.y_test)) == (sizes[owner] - held - gap, held)


def test_the_roles_are_as_their_readme_says(real_data: Path) -> None:
    table = pq.read_table(need(real_data, "shakespeare") / "shakespeare.parquet")
    roles, lines = (table[column].to_pylist() for column in ("character_id", "text"))
    texts, found = dict(zip(roles, lines, strict=True)), source("shakespeare")
    assert len(texts) == 609
    assert sum(map(len, texts.values())) == 3_972_572
    assert found.train.owners is not None
    assert set("".join(texts.values()).replace("\n", " ")) == set(CHARACTERS)
    assert found.train.y.min() > 0
    assert Counter(found.train.owners.tolist()) == {
        role: (len(text) - 1) // 80 for role, text in texts.items()
    }


@pytest.mark.exhaustive
def test_the_articles_are_as_their_readme_says(real_data: Path) -> None:
    need(real_data, "ag_news")
    found = source("ag_news")
    assert found.test is not None
    assert found.train.groups is not None
    assert found.test.groups is not None
    for pool, each in ((found.train, 16_000), (found.test, 1_900)):
        tokens = pool.read(np.arange(len(pool.y)))
        for topic in ("World", "Sports", "Business", "Sci/Tech"):
            ends = int((tokens[pool.groups == topic] == 1).sum())
            # the last article may end in the rest that makes no window
            assert each - 1 <= ends <= each, topic
    assert (found.train.y == 0).mean() < 0.25
    assert set(np.unique(found.train.y).tolist()) == set(range(2000))
    federation = Federation.simulate("ag_news", clients=20, seed=0)
    assert federation.truth is not None
    assert Counter(Counter(federation.truth).values()) == {5: 4}
    assert federation.scenario == "topics"
