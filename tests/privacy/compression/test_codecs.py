"""Compression: error bounds on any rows, real bytes, and frames that nobody can have sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from securecluster.errors import FrameError, UpdateError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Header, Rows
from securecluster.privacy.compression.codecs import build, check
from securecluster.privacy.masking.masks import MASKS
from securecluster.protocols.common.messages import Update

NAMES = ("8bit", "4bit", "1bit", "topk:0.01", "topk:0.3", "topk:1")
ROWS = st.tuples(st.integers(1, 3), st.integers(1, 21)).flatmap(
    lambda shape: arrays(
        np.float32, shape, elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
    )
)


def back(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    (stage,) = build(name, x.shape[1])
    coded = stage.forward(torch.from_numpy(x), 1)
    assert coded.dtype == torch.uint8 and coded.shape == (len(x), stage.size)
    return stage.decode(coded).numpy().astype(np.float64), coded.numpy()


@given(ROWS)
def test_numbers_in_levels_err_by_half_a_level(x):
    largest = np.abs(x.astype(np.float64)).max(1, keepdims=True)
    for name, levels in (("8bit", 127), ("4bit", 7)):
        error = np.abs(back(name, x)[0] - x)
        assert (error <= largest / (2 * levels) * (1 + 1e-6)).all()


@pytest.mark.exhaustive
@given(ROWS)
def test_signs_with_the_mean_magnitude(x):
    found, wide = back("1bit", x)[0], x.astype(np.float64)
    np.testing.assert_allclose(
        np.abs(found), np.broadcast_to(np.abs(wide).mean(1, keepdims=True), x.shape), rtol=1e-6
    )
    assert (np.sign(found) * np.sign(wide) >= 0).all()
    scale = (wide**2).sum(1)
    expected = scale - np.abs(wide).sum(1) ** 2 / x.shape[1]
    slack = 1e-5 * scale.max() + 1e-300
    np.testing.assert_allclose(((wide - found) ** 2).sum(1), expected, atol=slack)


@given(ROWS, st.sampled_from([0.01, 0.3, 1.0]))
def test_the_largest_numbers_stay_as_they_are(x, share):
    found, k = back(f"topk:{share:g}", x)[0], int(np.ceil(share * x.shape[1]))
    for row, kept in zip(x, found, strict=True):
        order = np.argsort(-np.abs(row), kind="stable")
        expected = np.zeros_like(row)
        expected[order[:k]] = row[order[:k]]
        np.testing.assert_array_equal(kept, expected)
    wide = x.astype(np.float64)
    assert (
        ((wide - found) ** 2).sum(1) <= (1 - k / x.shape[1]) * (wide**2).sum(1) * (1 + 1e-9)
    ).all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_come_back_as_zeros(name):
    assert not back(name, np.zeros((2, 13), dtype=np.float32))[0].any()


def test_zeros_that_rows_have_in_common_are_no_common_direction():
    draw = np.random.default_rng(0)
    x = np.zeros((2, 40_000), dtype=np.float32)
    x[:, :100] = draw.normal(size=(2, 100))
    found = back("1bit", x)[0]
    cosine = found[0] @ found[1] / np.linalg.norm(found[0]) / np.linalg.norm(found[1])
    assert abs(cosine) < 5 / np.sqrt(40_000)
    np.testing.assert_array_equal(found, back("1bit", x)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(name, bad):
    (stage,) = build(name, 5)
    with pytest.raises(UpdateError, match="not finite"):
        stage.forward(torch.tensor([[1.0, 2.0, bad, 0.0, 1.0]]), 1)
    with pytest.raises(UpdateError, match="not finite"):
        stage.forward(torch.full((1, 5), 1e300, dtype=torch.float64), 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_the_frame(name):
    d = 1001
    (stage,) = build(name, d)
    coded = stage.forward(torch.randn(2, d, generator=torch.Generator().manual_seed(0)), 1)
    header = Header("c", "train", "gather", 1, 1, "client/0", "server", 1)
    empty = Update(Rows(torch.zeros(2, 0, dtype=torch.uint8)), None)
    frame = wire.encode(header, Update(Rows(coded), None), 1)
    without = wire.encode(header, empty, 1)
    assert wire.size(header, Update(Rows(coded), None), 1) == len(frame)
    assert abs(len(frame) - len(without) - stage.size) <= 16  # the header's text names the length
    dense = {"8bit": 8 * d, "4bit": 4 * d, "1bit": d}
    bits = (dense | {"topk:0.01": 11 * 48, "topk:0.3": 301 * 48, "topk:1": d * 48})[name]
    assert 0 <= stage.size - bits / 8 < 5
    assert torch.equal(
        stage.decode(wire.decode(frame, Update)[1].delta.values), stage.decode(coded)[1:]
    )


def test_large_rows_have_wide_places():
    (stage,) = build("topk:0.0001", 40_000)
    x = torch.zeros(1, 40_000)
    x[0, 39_999], x[0, 33_000] = -1.0, 2.0
    assert stage.size == 4 * 8
    assert stage.decode(stage.forward(x, 1))[0, [33_000, 39_999]].tolist() == [2.0, -1.0]


@pytest.mark.parametrize("name", NAMES)
def test_forged_rows_are_refused(name):
    (stage,) = build(name, 11)
    good = stage.forward(torch.randn(1, 11, generator=torch.Generator().manual_seed(0)), 1)
    longer = torch.cat([good, good[:, :1]], 1)
    forged = [good[:, :-1], longer, good.to(torch.int32), torch.full_like(good, 255)]
    for rows in forged:
        with pytest.raises(FrameError, match="does not parse"):
            stage.decode(rows)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("8bit", [(4, 255)]),  # levels are 0 to 254
        ("4bit", [(4, 0x0F), (4, 0xF0), (9, 0x10)]),  # 0 to 14, and half a byte of padding
        ("1bit", [(5, 0x08), (5, 0x80)]),  # 11 bits, and five of padding
    ],
)
def test_codes_that_stand_for_no_number_are_refused(name, places):
    (stage,) = build(name, 11)
    good = stage.forward(torch.ones(1, 11), 1)
    for position, code in places:
        forged = good.clone()
        forged[0, position] |= code
        with pytest.raises(FrameError, match="that stands for no number"):
            stage.decode(forged)
    with pytest.raises(UsageError, match="rows of 0 numbers cannot be compressed"):
        build(name, 0)


@given(st.sampled_from(NAMES), st.binary(max_size=40))
def test_any_bytes_are_refused_or_stand_for_finite_numbers(name, data):
    (stage,) = build(name, 11)
    rows = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())[None]
    try:
        found = stage.decode(rows)
    except FrameError:
        return
    assert found.shape == (1, 11) and bool(found.isfinite().all())


def test_many_rows_go_by_blocks():
    x = torch.randn(300, 2001, generator=torch.Generator().manual_seed(1))
    for name in NAMES:
        (stage,) = build(name, 2001)
        assert torch.equal(
            stage.decode(stage.forward(x, 1))[299:], stage.decode(stage.forward(x[299:], 1))
        )


@pytest.mark.parametrize(
    "name", ["8 bit", "topk", "topk:0", "topk:2", "topk:x", "topk:nan", "2bit", ""]
)
def test_names_that_do_not_exist(name):
    with pytest.raises(UsageError):
        check(name, "none")


def test_the_largest_few_of_a_spread_row_are_refused():
    for mask in MASKS:
        if mask in ("rotation", "haar"):
            with pytest.raises(UsageError, match="spreads"):
                check("topk:0.1", mask)
        else:
            check("topk:0.1", mask)
        check("4bit", mask, sketch=64)
    with pytest.raises(UsageError, match="spreads"):
        check("topk:0.1", "none", sketch=64)


@pytest.mark.parametrize("name", ["8bit", "4bit", "1bit"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), -1.0, -1e-30])
def test_a_scale_that_no_client_can_have_made_is_refused(name: str, scale: float) -> None:
    (stage,) = build(name, 6)
    coded = stage.forward(torch.linspace(-1, 1, 12).reshape(2, 6), 1)
    stage.decode(coded)
    coded[1, :4] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(FrameError, match="a scale that is none"):
        stage.decode(coded)
