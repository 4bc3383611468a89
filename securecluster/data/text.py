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

# characters of a role's text; any other character is number 0, and a line's end is a space
CHARACTERS = " !\"&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz}"
SPAN = 80  # characters in a window (Caldas et al. 2018, LEAF)

UNKNOWN = 0  # number of <unk>
END = 1  # number of <eos>
WORDS = 2000  # size of the vocabulary, including <unk> and <eos>
LENGTH = 20  # words in a window
TOPICS = ("World", "Sports", "Business", "Sci/Tech")

Windows = tuple[Labels, Labels]


def shakespeare() -> Source:
    """Return Shakespeare's speeches by role: x and y (n, 80) int64 characters.

    Each position of y is the character after that position of x. Windows of a role do not overlap
    (not in the paper: LEAF predicts one character from each window of 80, which costs 80 times as
    much per prediction; McMahan et al. 2017 predict every next character as well). Owners are
    roles, named by play and character, with windows in the order of the play. One window is left
    out before the held-out ones, as in LEAF. Roles with less than five windows are left out.

    Raises:
        UsageError: files, packages or the connection are missing, or the columns are others.
    """
    return _shakespeare(folder())


def ag_news() -> Source:
    """Return news articles of four topics: x and y (n, 20) int64 words.

    Each position of y is the word after that position of x. The articles of a topic form one stream
    in the order of the file, each ended by <eos>, which is cut into windows without overlap. Groups
    are the topics. Words are runs of lower-cased letters, or of digits. The vocabulary contains
    <unk>, <eos> and the 1998 most frequent words of the training articles. It is assumed to be
    public; otherwise it would reveal words of the clients' articles.

    Raises:
        UsageError: files, packages or the connection are missing, or the columns are others.
    """
    return _ag_news(folder())


@cache
def _shakespeare(data_folder: Path | None) -> Source:
    """Return the data set in a folder, or on the hub."""
    roles = []
    pieces = []
    for role, texts_of_role in _roles(data_folder).items():
        for text in texts_of_role:
            roles.append(role)
            pieces.append(_cut(characters(text), SPAN))
    window_counts = [len(x) for x, _ in pieces]
    owners = np.repeat(np.array(roles, object), window_counts)
    keep = lasting(owners, gap=1)
    if not len(keep):
        raise UsageError(
            f"no role of shakespeare has five windows of {SPAN} characters: download or write the "
            "set again"
        )
    x, y = _joined(pieces)
    pool = ArrayPool(x[keep], y[keep], owners[keep], gap=1)
    tokens = 1 + len(CHARACTERS)
    return Source("shakespeare", tokens, (SPAN,), pool, objective=Language())


def _roles(data_folder: Path | None) -> dict[str, list[str]]:
    """Return each role's pieces of text, in order.

    Args:
        data_folder: of all data sets, or None to load the set from the hub. The file in the folder
            has either a column of texts, or the hub's columns of windows.
    """
    hub = HUBS["shakespeare"]
    file = "shakespeare/shakespeare.parquet"
    if data_folder is None:
        rows = hub_rows("shakespeare", hub, "train", ("character_id", "x", "y"), files=file)
        roles = hub_texts(rows, "character_id")
        return _join_windows(roles, hub_texts(rows, "x"), hub_texts(rows, "y"))
    path = the_file(data_folder, file, hub)
    columns = open_parquet(path, ("character_id",)).schema_arrow.names
    roles = texts(path, "character_id")
    if "x" in columns:
        return _join_windows(roles, texts(path, "x"), texts(path, "y"))
    pieces: dict[str, list[str]] = {}
    for role, text in zip(roles, texts(path, "text"), strict=True):
        pieces.setdefault(role, []).append(text)
    return pieces


def _join_windows(
    names: Sequence[str], xs: Sequence[str], ys: Sequence[str]
) -> dict[str, list[str]]:
    """Return each role's pieces of text, as `joined` does, after checking their lengths.

    Raises:
        UsageError: most rows do not continue the row before.
    """
    texts_of_roles = joined(names, xs, ys)
    piece_count = sum(len(pieces) for pieces in texts_of_roles.values())
    # pieces of single rows overlap, so their windows would occur on both sides of the gap
    if len(names) < SPAN * piece_count:
        raise UsageError(
            "the windows of shakespeare do not follow each other, so they make no text: keep the "
            "rows in their order"
        )
    return texts_of_roles


def joined(names: Sequence[str], xs: Sequence[str], ys: Sequence[str]) -> dict[str, list[str]]:
    """Return each role's pieces of text from the hub's windows.

    A new piece begins at each window that does not continue the one before.

    Args:
        names: role of each row.
        xs: windows of 80 characters, each one character further than the one before.
        ys: the character after each window.
    """
    pieces_of_roles: dict[str, list[list[str]]] = {}
    next_window: dict[str, str] = {}
    for name, x, y in zip(names, xs, ys, strict=True):
        next_character = y or " "
        if next_window.get(name) != x:
            pieces_of_roles.setdefault(name, []).append([x])
        pieces_of_roles[name][-1].append(next_character)
        next_window[name] = x[1:] + next_character
    # characters are joined once at the end, in time linear in the length of a piece
    texts_of_roles: dict[str, list[str]] = {}
    for name, pieces in pieces_of_roles.items():
        texts_of_roles[name] = ["".join(piece) for piece in pieces]
    return texts_of_roles


def characters(text: str) -> Labels:
    """Return the numbers (n,) of a text's characters, from 0 to the length of `CHARACTERS`."""
    number_of = np.zeros(129, np.int64)  # by code point; the last entry is for all beyond ASCII
    code_points_of_characters = [ord(character) for character in CHARACTERS]
    number_of[code_points_of_characters] = 1 + np.arange(len(CHARACTERS))
    number_of[ord("\n")] = number_of[ord(" ")]
    code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    tokens: Labels = number_of[np.minimum(code_points, 128)]
    return tokens


@cache
def _ag_news(data_folder: Path | None) -> Source:
    """Return the data set in a folder, or on the hub."""
    train_articles = _articles(data_folder, "train")
    number_of_word = vocabulary(train_articles)
    train = _pool(train_articles, number_of_word)
    test = _pool(_articles(data_folder, "test"), number_of_word)
    return Source("ag_news", WORDS, (LENGTH,), train, test, objective=Language())


def _articles(data_folder: Path | None, split: str) -> list[list[str]]:
    """Return the words of each topic's articles, in the order of the file.

    Args:
        data_folder: of all data sets, or None to load the set from the hub.
        split: "train" or "test".

    Raises:
        UsageError: data that cannot be read, or with other labels than the topics'.
    """
    hub = HUBS["ag_news"]
    articles: list[str] = []
    if data_folder is None:
        rows = hub_rows("ag_news", hub, split, ("text", "label"))
        label_column = rows.select_columns(["label"])[:]
        labels = np.asarray(label_column["label"])
        articles = hub_texts(rows, "text")
    else:
        files = parquet_files(data_folder, "ag_news", hub, split)
        labels = np.concatenate([numbers(file, "label") for file in files])
        for file in files:
            articles += texts(file, "text")
    is_topic = np.isin(labels, np.arange(len(TOPICS)))
    if not is_topic.all():
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
_REMAINS = ("quot;", "amp;", "lt;", "gt;", "nbsp;", "hellip;", "mdash;", "ndash;", "\\")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[0-9]+|\n")


def words(articles: Iterable[str]) -> list[str]:
    r"""Return all words of articles, with \n after those of each article.

    Remains of markup (#39; quot; &lt;b&gt; and backslashes) are removed.

    Args:
        articles: their texts.
    """
    # joined, since one long text takes far fewer calls than many short ones
    lines = [article.replace("\n", " ") + "\n" for article in articles]
    text = "".join(lines).lower()
    text = _MARKUP.sub(" ", text)
    # both are apostrophes, in some articles with a space before them
    text = text.replace("#146;", "#39;")
    text = text.replace(" #39;", "#39;")
    text = _APOSTROPHE.sub("'", text)
    text = _ENTITY.sub(" ", text)
    for mark in _REMAINS:
        text = text.replace(mark, " ")
    result: list[str] = _WORD.findall(text)
    return result


def vocabulary(streams: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return the numbers of the most frequent words, and the number of an article's end.

    Args:
        streams: results of `words`.
    """
    counts = Counter(chain.from_iterable(streams))
    counts.pop("\n", None)
    # equally frequent words in alphabetical order, so that numbers do not depend on the articles'
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    number_of_word = {"\n": END}
    for number, word in enumerate(ranked[: WORDS - 2], 2):
        number_of_word[word] = number
    return number_of_word


def _pool(streams: Sequence[Sequence[str]], number_of_word: dict[str, int]) -> ArrayPool:
    """Return a pool of the windows of all topics.

    Args:
        streams: words of each topic's articles.
        number_of_word: result of `vocabulary`.
    """
    pieces = []
    for stream in streams:
        tokens = [number_of_word.get(word, UNKNOWN) for word in stream]
        windows_of_topic = _cut(np.array(tokens, np.int64), LENGTH)
        pieces.append(windows_of_topic)
    x, y = _joined(pieces)
    window_counts = [len(windows) for windows, _ in pieces]
    groups = np.repeat(np.array(TOPICS, object), window_counts)
    return ArrayPool(x, y, groups=groups)


def _joined(pieces: Sequence[Windows]) -> Windows:
    """Return the windows x and y of all pieces."""
    x = np.concatenate([windows for windows, _ in pieces])
    y = np.concatenate([shifted for _, shifted in pieces])
    return x, y


def _cut(stream: Labels, length: int) -> Windows:
    """Return windows of a stream without overlap, and their targets.

    Args:
        stream: numbers of characters or words (n,).
        length: of a window.

    Returns:
        Windows x (w, length), and the same windows shifted by one position, y (w, length).
    """
    # the last target needs one position after the last window
    count = max(0, len(stream) - 1) // length
    end = count * length
    x = stream[:end].reshape(count, length)
    y = stream[1 : 1 + end].reshape(count, length)
    return x, y


__all__ = ["CHARACTERS", "HUBS", "LENGTH", "SPAN", "TOPICS", "WORDS", "ag_news", "shakespeare"]
