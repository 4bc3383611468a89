"""The longest common subsequence against the plain dynamic programme."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.errors import UsageError
from securecluster.protocols.nsim import lcss
from securecluster.protocols.nsim.lcss import similarities, similarity


def plain(a: Any, b: Any, radius: float, window: int | None) -> float:
    """The recurrence of Vlachos et al. 2002, as it is printed, with a Euclidean match."""
    length = np.zeros((len(a) + 1, len(b) + 1), int)
    for i in range(len(a)):
        for j in range(len(b)):
            near = (
                sum((float(p) - float(q)) ** 2 for p, q in zip(a[i], b[j], strict=True))
                <= radius * radius
            )
            if near and (window is None or abs(i - j) <= window):
                length[i + 1, j + 1] = length[i, j] + 1
            else:
                length[i + 1, j + 1] = max(length[i, j + 1], length[i + 1, j])
    return float(length[-1, -1]) / min(len(a), len(b))


@st.composite
def paths(draw: st.DrawFn) -> list[np.ndarray]:
    """Up to five sequences on a coarse grid, so that points coincide and distances tie with the
    radius.
    """
    k = draw(st.integers(1, 3))
    point = st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=k, max_size=k)
    return [
        np.array(own)
        for own in draw(st.lists(st.lists(point, min_size=1, max_size=12), min_size=2, max_size=5))
    ]


@pytest.mark.exhaustive
@given(paths(), st.sampled_from([0.0, 0.25, 0.3, 0.5, 2.0]), st.sampled_from([None, 0, 1, 3]))
def test_all_pairs_equal_the_plain_dynamic_programme(
    sequences: list[np.ndarray], radius: float, window: int | None
) -> None:
    found = similarities(sequences, radius, window)
    wanted = [[plain(a, b, radius, window) for b in sequences] for a in sequences]
    np.testing.assert_array_equal(found, wanted)


def test_blocks_and_words_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    sequences = [draw.random((n, 2)) for n in (1, 7, 64, 65, 130)]
    wanted = [[plain(a, b, 0.3, None) for b in sequences] for a in sequences]
    for block in (1, 300, 1 << 16):
        monkeypatch.setattr(lcss, "BLOCK", block)
        np.testing.assert_array_equal(similarities(sequences, 0.3), wanted)


def test_far_paths_share_nothing_and_a_part_is_all_of_the_shorter() -> None:
    path = np.linspace([0, 0], [1, 1], 50)
    assert similarity(path, path + 5, 0.2) == 0
    assert similarity(path, path[10:20], 1e-9) == 1
    assert similarity(path[:1], path, 0.0) == 1
    # backwards only one point is left in common
    assert similarity(path, path[::-1], 1e-3) == 1 / 50


def test_what_cannot_be_compared_is_refused() -> None:
    good = np.zeros((3, 2))
    for radius in (-0.1, np.nan, np.inf, "0.2", None, True):
        with pytest.raises(UsageError, match="radius"):
            similarities([good, good], radius)  # type: ignore[arg-type]
    for window in (-1, 0.5, "all"):
        with pytest.raises(UsageError, match="window"):
            similarities([good, good], 0.2, window)  # type: ignore[arg-type]
    for bad in (np.zeros((0, 2)), np.zeros(3), np.zeros((3, 1)), np.full((3, 2), np.nan)):
        with pytest.raises(UsageError, match="sequence 1"):
            similarities([good, bad], 0.2)
