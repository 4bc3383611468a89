"""Text read from small files made by hand; the oracles are plain loops over the same rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster.data import Federation, Iid, text
from securecluster.data.datasets import FOLDER, source
from securecluster.data.text import CHARACTERS, characters, joined, vocabulary, words
from securecluster.errors import UsageError
from securecluster.models.objectives import Language

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LINE = "Who's there? Nay, answer me: stand, and unfold yourself.\nLong live the king! "
ROLES = {
    "HAMLET_HAM": (LINE * 20)[: 7 * 80 + 1],
    "HAMLET_GHOST": "\u00e9" + (LINE * 20)[: 9 * 80 + 30],
    "HAMLET_CLOWN": (LINE * 9)[: 5 * 80],
}
LEAF = [
    (role, t[i : i + 80], t[i + 80])
    for role, full in ROLES.items()
    for t in [full.replace("\n", " ")]
    for i in range(len(t) - 80)
]
ARTICLES = [
    (
        'Oil #39;s up  quot;again quot; Oil\\prices rose &lt;A HREF="x.com?a=b"&gt;to&lt;/A&gt; '
        "\\$3.5 #36; a barrel",
        2,
    ),
    ("Wolves win cup: the wolves won #39;em all", 1),
    ("EU &lt;b&gt;votes&lt;/b&gt; amp; waits; don #146;t", 0),
    ("The oil, the rig", 2),
]


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small sets in it, which the environment names."""
    roles = tmp_path / "shakespeare" / "shakespeare.parquet"
    write(roles, character_id=list(ROLES), text=list(ROLES.values()))
    many = [
        (f"{body} {k} {'news ' * (k % 5)}", label)
        for k in range(60)
        for body, label in (*ARTICLES, ("Chips get small", 3))
    ]
    for split, rows in (("train", many), ("test", many[:100])):
        texts, labels = (list(column) for column in zip(*rows, strict=True))
        write(tmp_path / "ag_news" / f"{split}.parquet", text=texts, label=labels)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def decoded(numbers: np.ndarray) -> str:
    return "".join("\u00e9" if n == 0 else CHARACTERS[n - 1] for n in numbers.tolist())


def test_roles_are_cut_into_windows_whose_every_place_predicts_the_next(folder: Path) -> None:
    found = source("shakespeare")
    assert found.objective == Language() and found.shape == (80,) and found.test is None
    assert found.classes == 1 + len(CHARACTERS) == 77 and len(set(CHARACTERS)) == 76
    assert found.train.owners is not None and found.train.gap == 1 and found.train.groups is None
    x = found.train.read(np.arange(len(found.train.y)))
    assert x.dtype == found.train.y.dtype == np.int64
    expected = {}
    for role, full in ROLES.items():
        plain = full.replace("\n", " ")
        starts = range(0, len(plain) - 80, 80)
        cut = [(plain[i : i + 80], plain[i + 1 : i + 81]) for i in starts]
        if len(cut) >= 5:
            expected[role] = cut
    # the clown lacks one character for his fifth window
    assert set(expected) == {"HAMLET_HAM", "HAMLET_GHOST"}
    for role, cut in expected.items():
        own = found.train.owners == role
        assert [
            (decoded(a), decoded(b)) for a, b in zip(x[own], found.train.y[own], strict=True)
        ] == cut


def test_a_role_is_tested_on_its_last_windows_after_a_gap(folder: Path) -> None:
    federation = Federation.simulate("shakespeare", clients=2, seed=3)
    assert federation.scenario == "natural"
    assert federation.names == ("HAMLET_GHOST", "HAMLET_HAM")
    assert federation.truth is None
    ham = federation.shards[1]
    plain = ROLES["HAMLET_HAM"].replace("\n", " ")
    assert [decoded(a) for a in ham.x] == [plain[80 * k : 80 * k + 80] for k in range(5)]
    assert [decoded(a) for a in ham.x_test] == [plain[480:560]]
    assert decoded(ham.y_test[0]) == plain[481:561]


def test_any_character_has_a_number() -> None:
    assert characters("\u00e9\u4e2d\U0001f600{~").tolist() == [0] * 5
    assert characters("\n").tolist() == characters(" ").tolist() == [1]
    assert characters(CHARACTERS).tolist() == list(range(1, 77)) and characters("?").tolist() != [0]


def test_the_hubs_windows_are_joined_to_the_same_text() -> None:
    plain = (LINE * 3).replace("\n", " ")
    pairs = [(plain[i : i + 80], plain[i + 80]) for i in range(len(plain) - 80)]
    names = ["A"] * len(pairs)
    assert joined(names, [x for x, _ in pairs], [y for _, y in pairs]) == {"A": [plain]}
    mixed = []
    for name, part in (("B", pairs[:4]), ("A", pairs[:9]), ("B", pairs[4:6]), ("A", pairs[30:33])):
        mixed += [(name, *pair) for pair in part]
    columns = [list(column) for column in zip(*mixed, strict=True)]
    assert joined(*columns) == {"B": [plain[:86]], "A": [plain[:89], plain[30:113]]}


def test_a_folder_may_hold_the_hubs_windows(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, other = source("shakespeare"), folder / "hub"
    names, x, y = (list(column) for column in zip(*LEAF, strict=True))
    write(other / "shakespeare" / "shakespeare.parquet", character_id=names, x=x, y=y)
    monkeypatch.setenv(FOLDER, str(other))
    hub = source("shakespeare")
    assert hub is not raw and np.array_equal(hub.train.y, raw.train.y)
    assert hub.train.owners is not None
    assert raw.train.owners is not None
    assert hub.train.owners.tolist() == raw.train.owners.tolist()


def test_windows_in_another_order_make_no_text(folder: Path) -> None:
    rows = [LEAF[k] for k in np.random.default_rng(0).permutation(len(LEAF))]
    names, x, y = (list(column) for column in zip(*rows, strict=True))
    write(folder / "shakespeare" / "shakespeare.parquet", character_id=names, x=x, y=y)
    with pytest.raises(UsageError, match="windows of shakespeare do not follow each other"):
        source("shakespeare")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (ARTICLES[0][0], "oil's up again oil prices rose to 3 5 a barrel"),
        (ARTICLES[1][0], "wolves win cup the wolves won em all"),
        (ARTICLES[2][0], "eu votes waits don't"),
        ("However; it's &lt;br&gt;10,000 quot;US quot;\\-led", "however it's 10 000 us led"),
        ("\\", ""),
    ],
)
def test_words_are_without_raw_marks(raw: str, expected: str) -> None:
    assert words([raw, "next\none"]) == [*expected.split(), "\n", "next", "one", "\n"]


def test_the_vocabulary_is_the_most_frequent_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "WORDS", 5)
    # b before d
    found = vocabulary([["b", "a", "c", "\n"], ["c", "a", "d", "c", "\n", "\n"]])
    assert found == {"\n": 1, "c": 2, "a": 3, "b": 4}
    assert vocabulary([["x"]]) == {"\n": 1, "x": 2}


def test_articles_of_a_topic_are_one_stream_of_words(folder: Path) -> None:
    found = source("ag_news")
    assert found.objective == Language()
    assert (found.classes, found.shape) == (2000, (20,))
    assert found.train.owners is None
    streams: dict[str, list[str]] = {}
    topics = ("World", "Sports", "Business", "Sci/Tech")
    table = pq.read_table(folder / "ag_news" / "train.parquet").to_pylist()
    for row in table:
        streams.setdefault(topics[row["label"]], []).extend(
            ["<eos>" if w == "\n" else w for w in words([row["text"]])]
        )
    assert found.train.groups is not None
    word = {n: w for w, n in vocabulary([words([row["text"] for row in table])]).items()}
    word |= {0: "<unk>", 1: "<eos>"}
    x = found.train.read(np.arange(len(found.train.y)))
    assert x.dtype == found.train.y.dtype == np.int64
    for topic, stream in streams.items():
        own = np.flatnonzero(found.train.groups == topic)
        assert len(own) == (len(stream) - 1) // 20
        for k, row in enumerate(own):
            assert [word[n] for n in x[row].tolist()] == stream[20 * k : 20 * k + 20]
            assert [word[n] for n in found.train.y[row].tolist()] == stream[
                20 * k + 1 : 20 * k + 21
            ]


def test_test_articles_are_read_by_the_training_articles_words(folder: Path) -> None:
    write(
        folder / "ag_news" / "test.parquet", text=["zebra oil " * 40, "wolves " * 90], label=[2, 1]
    )
    found = source("ag_news")
    number = vocabulary(
        [words(pq.read_table(folder / "ag_news" / "train.parquet")["text"].to_pylist())]
    )
    assert found.test is not None
    read = found.test.read(np.array([0, 5])).ravel()
    assert set(read.tolist()) == {0, number["oil"], number["wolves"]}
    assert found.test.groups is not None
    assert found.test.groups.tolist() == ["Sports"] * 4 + ["Business"] * 4


@pytest.mark.parametrize(
    ("path", "columns", "sentence"),
    [
        (
            "shakespeare/shakespeare",
            None,
            "where no shakespeare/shakespeare.parquet lies: put it there, or unset "
            "SECURECLUSTER_DATA",
        ),
        (
            "shakespeare/shakespeare",
            {"character_id": ["A"], "text": ["To be"]},
            "no role of shakespeare has five windows of 80 characters",
        ),
        (
            "shakespeare/shakespeare",
            {"character_id": ["A"], "text": [3]},
            "column 'text' of .* holds int64, not text",
        ),
        (
            "shakespeare/shakespeare",
            {"character_id": ["A"], "text": [None]},
            "column 'text' of .* has 1 empty cells",
        ),
        (
            "shakespeare/shakespeare",
            {"character_id": ["A"], "texts": ["a"]},
            "column of shakespeare.parquet 'text': did you mean 'texts'",
        ),
        ("ag_news/test", None, "where no ag_news/test-.*.parquet lies: put fancyzhx/ag_news there"),
        ("ag_news/test", {"text": ["a"], "label": [4]}, "ag_news has a label outside 0 … 3"),
        (
            "ag_news/test",
            {"text": ["a"], "label": ["World"]},
            "column 'label' of .* holds .*string, not numbers",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(
    path: str, columns: dict[str, Any] | None, sentence: str, folder: Path
) -> None:
    (folder / f"{path}.parquet").unlink()
    if columns is not None:
        write(folder / f"{path}.parquet", **columns)
    with pytest.raises(UsageError, match=sentence) as caught:
        source(path.split("/")[0])
    assert "\n" not in str(caught.value)


HUB = """
import json, sys, warnings
warnings.simplefilter("ignore")
from securecluster.data import Federation, Iid, text
from securecluster.errors import UsageError
folder = sys.argv[1]
text.HUBS.update(ag_news=folder + "/ag_news", shakespeare=folder + "/roles")
digests = {
    name: Federation.simulate(name, scenario=Iid(), clients=2, seed=0).digest()
    for name in text.HUBS
}
text.HUBS["shakespeare"] = folder + "/ag_news"
text._shakespeare.cache_clear()
try:
    text.shakespeare()
except UsageError as error:
    said = str(error)
print(json.dumps({"digests": digests, "said": said}))
"""


@pytest.mark.exhaustive
def test_the_hub_is_read_through_datasets(
    folder: Path, read_hub: Callable[[str, Path], Any]
) -> None:
    names, x, y = (list(column) for column in zip(*LEAF, strict=True))
    write(folder / "roles" / "train.parquet", character_id=names, x=x, y=y)
    two = partial(Federation.simulate, scenario=Iid(), clients=2, seed=0)
    expected = {name: two(name).digest() for name in ("shakespeare", "ag_news")}
    result = read_hub(HUB, folder)
    assert result["digests"] == expected
    assert "unknown column of" in result["said"]
    assert "'character_id'" in result["said"]
