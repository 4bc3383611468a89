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
"""characters of a role's text; any other character is number 0, and a line's end is a space"""
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
    """Return Shakespeare's speeches by role: x and y (n, 80) int64 characters.

    Every place of y is the character after that place of x. Windows of a role do not overlap (ours:
    LEAF predicts one character from each window of 80, which costs 80 times as much a prediction;
    McMahan et al. 2017 predict every next character as well). Owners are roles, which are named by
    play and character; their windows are in the order of the play, and one is left out before the
    held-out ones, as in LEAF. Roles with less than five windows are left out here.

    Raises:
        UsageError: files, packages or the connection are missing, or the columns are others.
    """
    return _shakespeare(folder())


def ag_news() -> Source:
    """Return news articles of four topics: x and y (n, 20) int64 words.

    Every place of y is the word after that place of x. The articles of a topic are one stream in
    the order of the file, each ended by <eos>, cut into windows without overlap; groups are the
    topics. Words are runs of letters, lower-cased, or of
    digits. The vocabulary are the 1998 most frequent words of the training articles, <unk> and
    <eos>: it is taken as public, so clients reveal nothing by it only where that holds.

    Raises:
        UsageError: files, packages or the connection are missing, or the columns are others.
    """
    return _ag_news(folder())


@cache
def _shakespeare(where: Path | None) -> Source:
    roles = []
    pieces = []
    for role, texts_of_role in _roles(where).items():
        for text in texts_of_role:
            roles.append(role)
            pieces.append(_cut(characters(text), SPAN))
    owners = np.repeat(np.array(roles, object), [len(x) for x, _ in pieces])
    keep = lasting(owners, gap=1)
    if not len(keep):
        raise UsageError(
            f"no role of shakespeare has five windows of {SPAN} characters: download or write the "
            "set again"
        )
    x, y = _joined(pieces)
    pool = ArrayPool(x[keep], y[keep], owners[keep], gap=1)
    return Source("shakespeare", 1 + len(CHARACTERS), (SPAN,), pool, objective=Language())


def _roles(where: Path | None) -> dict[str, list[str]]:
    """Return each role's pieces of text, in order."""
    hub = HUBS["shakespeare"]
    file = "shakespeare/shakespeare.parquet"
    if where is None:
        rows = hub_rows("shakespeare", hub, "train", ("character_id", "x", "y"), files=file)
        roles = hub_texts(rows, "character_id")
        return _whole(roles, hub_texts(rows, "x"), hub_texts(rows, "y"))
    path = the_file(where, file, hub)
    columns = open_parquet(path, ("character_id",)).schema_arrow.names
    roles = texts(path, "character_id")
    if "x" in columns:
        return _whole(roles, texts(path, "x"), texts(path, "y"))
    pieces: dict[str, list[str]] = {}
    for role, text in zip(roles, texts(path, "text"), strict=True):
        pieces.setdefault(role, []).append(text)
    return pieces


def _whole(names: Sequence[str], xs: Sequence[str], ys: Sequence[str]) -> dict[str, list[str]]:
    """Return the joined texts.

    Raises:
        UsageError: they are scraps. Windows cut from rows that overlap would lie on both sides of
            the gap.
    """
    texts_of = joined(names, xs, ys)
    pieces = sum(len(own) for own in texts_of.values())
    if len(names) < SPAN * pieces:
        raise UsageError(
            "the windows of shakespeare do not follow each other, so they make no text: keep the "
            "rows in their order"
        )
    return texts_of


def joined(names: Sequence[str], xs: Sequence[str], ys: Sequence[str]) -> dict[str, list[str]]:
    """Return each role's pieces of text, from the hub's form.

    Where a window does not go on from the one before, a new piece of text begins.

    Args:
        names: the role of each row.
        xs: windows of 80 characters, each one character further than the one before.
        ys: the character after each window.
    """
    pieces_of: dict[str, list[list[str]]] = {}
    next_window: dict[str, str] = {}
    for name, x, y in zip(names, xs, ys, strict=True):
        next_character = y or " "
        if next_window.get(name) != x:
            pieces_of.setdefault(name, []).append([x])
        pieces_of[name][-1].append(next_character)
        next_window[name] = x[1:] + next_character
    texts_of: dict[str, list[str]] = {}
    for name, pieces in pieces_of.items():
        texts_of[name] = ["".join(piece) for piece in pieces]
    return texts_of


def characters(text: str) -> Labels:
    """Return the numbers (n,) of a text's characters."""
    number_of = np.zeros(129, np.int64)  # the last place stands for all that is not ASCII
    number_of[[ord(c) for c in CHARACTERS]] = 1 + np.arange(len(CHARACTERS))
    number_of[ord("\n")] = number_of[ord(" ")]
    code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    tokens: Labels = number_of[np.minimum(code_points, 128)]
    return tokens


@cache
def _ag_news(where: Path | None) -> Source:
    articles = _articles(where, "train")
    number = vocabulary(articles)
    train = _pool(articles, number)
    test = _pool(_articles(where, "test"), number)
    return Source("ag_news", WORDS, (LENGTH,), train, test, objective=Language())


def _articles(where: Path | None, split: str) -> list[list[str]]:
    """Return each topic's words, the articles in the order of the file."""
    hub = HUBS["ag_news"]
    articles: list[str] = []
    if where is None:
        rows = hub_rows("ag_news", hub, split, ("text", "label"))
        labels = np.asarray(rows.select_columns(["label"])[:]["label"])
        articles = hub_texts(rows, "text")
    else:
        files = parquet_files(where, "ag_news", hub, split)
        labels = np.concatenate([numbers(file, "label") for file in files])
        for file in files:
            articles += texts(file, "text")
    if not np.isin(labels, np.arange(len(TOPICS))).all():
        raise UsageError(
            f"ag_news has a label outside 0 … {len(TOPICS) - 1}: this is not the data set that the "
            f"hub calls {hub}"
        )
    streams = []
    for topic in range(len(TOPICS)):
        rows_of_topic = np.flatnonzero(labels == topic)
        streams.append(words(articles[row] for row in rows_of_topic))
    return streams


_MARKUP = re.compile(r"&lt;.*?&gt;|<[^>\n]*>")
_APOSTROPHE = re.compile(r"#39;(?=(?:s|t|d|m|re|ve|ll)\b)")  # elsewhere it is a quotation mark
_ENTITY = re.compile(r"#\d+;")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[0-9]+|\n")


def words(articles: Iterable[str]) -> list[str]:
    r"""Return all words, each article's followed by \n.

    Marks that are left of the raw form (#39; quot; &lt;b&gt; and backslashes) are taken out.
    """
    # one text: far fewer calls
    plain = "".join(article.replace("\n", " ") + "\n" for article in articles).lower()
    plain = _MARKUP.sub(" ", plain).replace("#146;", "#39;").replace(" #39;", "#39;")
    plain = _APOSTROPHE.sub("'", plain)
    plain = _ENTITY.sub(" ", plain)
    for mark in ("quot;", "amp;", "lt;", "gt;", "nbsp;", "hellip;", "mdash;", "ndash;", "\\"):
        plain = plain.replace(mark, " ")
    found: list[str] = _WORD.findall(plain)
    return found


def vocabulary(streams: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return the numbers of the most frequent words, and that of an article's end.

    Words are numbered from 2, those that are equally frequent in alphabetical order.
    """
    counts = Counter(chain.from_iterable(streams))
    counts.pop("\n", None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    number_of = {"\n": END}
    for number, word in enumerate(ranked[: WORDS - 2], 2):
        number_of[word] = number
    return number_of


def _pool(streams: Sequence[Sequence[str]], number_of: dict[str, int]) -> ArrayPool:
    """Return the windows of each topic's stream of words."""
    pieces = []
    for stream in streams:
        tokens = [number_of.get(word, UNKNOWN) for word in stream]
        pieces.append(_cut(np.array(tokens, np.int64), LENGTH))
    x, y = _joined(pieces)
    groups = np.repeat(np.array(TOPICS, object), [len(windows) for windows, _ in pieces])
    return ArrayPool(x, y, groups=groups)


def _joined(pieces: Sequence[Windows]) -> Windows:
    """Return the windows of all pieces, and those moved on by one."""
    return np.concatenate([x for x, _ in pieces]), np.concatenate([y for _, y in pieces])


def _cut(stream: Labels, length: int) -> Windows:
    """Return windows (w, length) of a stream without overlap, and the same moved on by one."""
    count = max(0, len(stream) - 1) // length
    end = count * length
    return stream[:end].reshape(count, length), stream[1 : 1 + end].reshape(count, length)


__all__ = ["CHARACTERS", "HUBS", "LENGTH", "SPAN", "TOPICS", "WORDS", "ag_news", "shakespeare"]
