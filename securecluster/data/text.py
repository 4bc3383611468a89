"""Text: Shakespeare's roles, character by character, and news articles by topic, word by word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np

from securecluster.data.dataset import Source
from securecluster.data.locations import (
    folder,
    hub_rows,
    hub_texts,
    numbers,
    parquet_files,
    texts,
    the_file,
)
from securecluster.data.pools import ArrayPool, Labels, lasting, open_parquet
from securecluster.errors import UsageError
from securecluster.models.objectives import Language

HUBS = {"shakespeare": "flwrlabs/shakespeare", "ag_news": "fancyzhx/ag_news"}

CHARACTERS = " !\"&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz}"
"""what a role's text is made of; any other character is number 0, and a line's end counts as a
space
"""
SPAN = 80
"""characters of a window (Caldas et al. 2018, LEAF)"""

UNKNOWN, END = 0, 1
"""the words' numbers <unk> and <eos>"""
WORDS = 2000
"""words of the vocabulary, <unk> and <eos> among them"""
LENGTH = 20
"""words of a window"""
TOPICS = ("World", "Sports", "Business", "Sci/Tech")

Windows = tuple[Labels, Labels]


def shakespeare() -> Source:
    """Speeches by role: x and y (n, 80) int64 characters, where every place of y is the character
    after that place of x.

    Windows of a role do not overlap (ours: LEAF predicts one character from each window of 80,
        which costs 80 times as much a
    prediction; McMahan et al. 2017 predict every next character as well). Owners are roles, which
    are named by play and character; their windows are in the order of the play, and one is left out
    before the held-out ones, as in LEAF. Roles with less than five windows are left out here.

    Raises:
        UsageError: files, packages or the connection are missing, or the columns are others.
    """
    return _shakespeare(folder())


def ag_news() -> Source:
    """News articles of four topics: x and y (n, 20) int64 words, where every place of y is the word
    after that place of x.

    The articles of a topic are one stream in the order of the file, each ended by <eos>, cut into
    windows without overlap; groups are the topics. Words are runs of letters, lower-cased, or of
    digits. The vocabulary are the 1998 most frequent words of the training articles, <unk> and
    <eos>: it is taken as public, so clients reveal nothing by it only where that holds.

    Raises:
        UsageError: files, packages or the connection are missing, or the columns are others.
    """
    return _ag_news(folder())


@cache
def _shakespeare(where: Path | None) -> Source:
    pieces = [
        (role, _cut(characters(piece), SPAN))
        for role, own in _roles(where).items()
        for piece in own
    ]
    owners = np.repeat(
        np.array([role for role, _ in pieces], object), [len(x) for _, (x, _) in pieces]
    )
    keep = lasting(owners, gap=1)
    if not len(keep):
        raise UsageError(
            f"no role of shakespeare has five windows of {SPAN} characters: download or write the "
            "set again"
        )
    x, y = _joined([windows for _, windows in pieces])
    return Source(
        "shakespeare",
        1 + len(CHARACTERS),
        (SPAN,),
        ArrayPool(x[keep], y[keep], owners[keep], gap=1),
        objective=Language(),
    )


def _roles(where: Path | None) -> dict[str, list[str]]:
    """Each role's pieces of text, in order."""
    name, hub, windows = "shakespeare", HUBS["shakespeare"], ("character_id", "x", "y")
    if where is None:
        rows = hub_rows(name, hub, "train", windows, files=f"{name}/{name}.parquet")
        return _whole(*(hub_texts(rows, column) for column in windows))
    path = the_file(where, f"{name}/{name}.parquet", hub)
    if "x" in open_parquet(path, ("character_id",)).schema_arrow.names:
        return _whole(*(texts(path, column) for column in windows))
    found: dict[str, list[str]] = {}
    for role, text in zip(texts(path, "character_id"), texts(path, "text"), strict=True):
        found.setdefault(role, []).append(text)
    return found


def _whole(names: Sequence[str], xs: Sequence[str], ys: Sequence[str]) -> dict[str, list[str]]:
    """The joined texts, unless they are scraps: windows cut from rows that overlap would lie on
    both sides of the gap.
    """
    found = joined(names, xs, ys)
    if len(names) < SPAN * sum(len(pieces) for pieces in found.values()):
        raise UsageError(
            "the windows of shakespeare do not follow each other, so they make no text: keep the "
            "rows in their order"
        )
    return found


def joined(names: Sequence[str], xs: Sequence[str], ys: Sequence[str]) -> dict[str, list[str]]:
    """Texts from the hub's form, windows x of 80 characters that move on by one and their next
    characters y.

    Where a window does not go on from the one before, a new piece of text begins.
    """
    found: dict[str, list[list[str]]] = {}
    ahead: dict[str, str] = {}
    for name, x, y in zip(names, xs, ys, strict=True):
        if ahead.get(name) != x:
            found.setdefault(name, []).append([x])
        found[name][-1].append(y or " ")
        ahead[name] = x[1:] + (y or " ")
    return {name: ["".join(piece) for piece in pieces] for name, pieces in found.items()}


def characters(text: str) -> Labels:
    """The numbers (n,) of a text's characters."""
    table = np.zeros(129, np.int64)  # the last place stands for all that is not ASCII
    table[[ord(c) for c in CHARACTERS]] = 1 + np.arange(len(CHARACTERS))
    table[ord("\n")] = table[ord(" ")]
    found: Labels = table[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), 128)]
    return found


@cache
def _ag_news(where: Path | None) -> Source:
    train, test = (_articles(where, split) for split in ("train", "test"))
    number = vocabulary(train)
    return Source(
        "ag_news", WORDS, (LENGTH,), _pool(train, number), _pool(test, number), objective=Language()
    )


def _articles(where: Path | None, split: str) -> list[list[str]]:
    """Each topic's words, the articles in the order of the file."""
    name, hub = "ag_news", HUBS["ag_news"]
    if where is None:
        rows = hub_rows(name, hub, split, ("text", "label"))
        labels, found = (
            np.asarray(rows.select_columns(["label"])[:]["label"]),
            hub_texts(rows, "text"),
        )
    else:
        files = parquet_files(where, name, hub, split)
        labels, found = (
            np.concatenate([numbers(f, "label") for f in files]),
            [text for f in files for text in texts(f, "text")],
        )
    if not np.isin(labels, np.arange(len(TOPICS))).all():
        raise UsageError(
            f"{name} has a label outside 0 … {len(TOPICS) - 1}: this is not the data set that the "
            f"hub calls {hub}"
        )
    return [
        words([found[row] for row in np.flatnonzero(labels == topic)])
        for topic in range(len(TOPICS))
    ]


_MARKUP = re.compile(r"&lt;.*?&gt;|<[^>\n]*>")
_APOSTROPHE = re.compile(r"#39;(?=(?:s|t|d|m|re|ve|ll)\b)")  # elsewhere it is a quotation mark
_ENTITY = re.compile(r"#\d+;")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[0-9]+|\n")


def words(articles: Iterable[str]) -> list[str]:
    r"""All words, each article's followed by \n, without the marks kept from the raw form (#39;
    quot; &lt;b&gt; and backslashes).
    """
    # one text: far fewer calls
    plain = "".join(article.replace("\n", " ") + "\n" for article in articles).lower()
    plain = _MARKUP.sub(" ", plain).replace("#146;", "#39;").replace(" #39;", "#39;")
    plain = _ENTITY.sub(" ", _APOSTROPHE.sub("'", plain))
    for mark in ("quot;", "amp;", "lt;", "gt;", "nbsp;", "hellip;", "mdash;", "ndash;", "\\"):
        plain = plain.replace(mark, " ")
    found: list[str] = _WORD.findall(plain)
    return found


def vocabulary(streams: Iterable[Sequence[str]]) -> dict[str, int]:
    """Numbers from 2 for the most frequent words, ties in alphabetical order, and that of an
    article's end.
    """
    counts = Counter(chain.from_iterable(streams))
    counts.pop("\n", None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {"\n": END} | {word: 2 + k for k, word in enumerate(ranked[: WORDS - 2])}


def _pool(streams: Sequence[Sequence[str]], number: dict[str, int]) -> ArrayPool:
    """Windows of each topic's stream."""
    pieces = [
        _cut(np.array([number.get(word, UNKNOWN) for word in stream], np.int64), LENGTH)
        for stream in streams
    ]
    return ArrayPool(
        *_joined(pieces), groups=np.repeat(np.array(TOPICS, object), [len(x) for x, _ in pieces])
    )


def _joined(pieces: Sequence[Windows]) -> Windows:
    return np.concatenate([x for x, _ in pieces]), np.concatenate([y for _, y in pieces])


def _cut(stream: Labels, length: int) -> Windows:
    """Windows (w, length) of a stream without overlap, and the same moved on by one."""
    count = max(0, len(stream) - 1) // length
    return stream[: count * length].reshape(count, length), stream[1 : 1 + count * length].reshape(
        count, length
    )


__all__ = ["CHARACTERS", "HUBS", "LENGTH", "SPAN", "TOPICS", "WORDS", "ag_news", "shakespeare"]
