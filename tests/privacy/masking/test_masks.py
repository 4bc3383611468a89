"""The permutations, and masks by name.

Permutations are exact, fresh, uniform, and drawn from ChaCha20 as they say.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given
from hypothesis import strategies as st

from securecluster.core.devices import cpu_threads
from securecluster.errors import UsageError
from securecluster.privacy.masking import keystream as stream
from securecluster.privacy.masking import masks
from securecluster.privacy.masking.keystream import words
from securecluster.privacy.pipeline import Kind, Pipeline


def mask(seed: bytes = bytes(range(32))) -> masks.Permutation:
    stage = masks.Permutation()
    stage.unlock(seed)
    return stage


@given(
    st.integers(1, 300),
    st.integers(0, 4),
    st.integers(0, 2**62),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_forward_and_inverse_undo_each_other_bit_for_bit(
    d: int, b: int, step: int, seed: bytes, dtype: torch.dtype
) -> None:
    rows = torch.arange(b * d).view(b, d).to(dtype)
    stage = mask(seed)
    there = stage.forward(rows, step)
    assert torch.equal(there.sort(-1).values, rows)
    assert torch.equal(mask(seed).inverse(there, step), rows)
    assert torch.equal(stage.forward(stage.inverse(rows, step), step), rows)
    assert torch.equal(rows, torch.arange(b * d).view(b, d).to(dtype))
    if b:
        assert torch.equal(stage.forward(rows[0], step), there[0])
        assert torch.equal(stage.inverse(there[0], step), rows[0])


def test_the_gram_is_kept_in_float64_and_every_client_has_the_same_order() -> None:
    rows = torch.randn(6, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    masked = torch.cat([mask().forward(row[None], 3) for row in rows])
    assert torch.equal(masked, mask().forward(rows, 3))
    assert not torch.equal(masked, rows)
    torch.testing.assert_close(masked @ masked.T, rows @ rows.T, rtol=1e-12, atol=1e-11)


def test_it_is_fresh_each_step_each_seed_and_each_dimension() -> None:
    values, stage = torch.arange(2000), mask()
    orders = [stage.forward(values, step) for step in range(6)]
    orders.append(mask(bytes(32)).forward(values, 0))
    for k, one in enumerate(orders):
        assert (one == values).float().mean() < 0.01
        for other in orders[:k]:
            assert (one == other).float().mean() < 0.01
    assert not torch.equal(stage.forward(torch.arange(1999), 1), orders[1][:1999])


def test_many_steps_later_the_order_is_still_the_steps_own() -> None:
    values, stage = torch.arange(100), mask()
    first = [stage.forward(values, step) for step in range(12)]
    for step in (3, 0, 11, 3):
        assert torch.equal(stage.forward(values, step), first[step])
    assert len(stage._drawn) <= stage._CACHED


def test_a_new_seed_takes_effect_on_steps_that_were_already_drawn() -> None:
    """A client that takes over another seed masks as its peers do."""
    values, stage = torch.arange(100), mask(bytes(32))
    stage.forward(values, 1)
    stage.unlock(bytes(range(32)))
    assert torch.equal(stage.forward(values, 1), mask().forward(values, 1))


def test_every_order_of_four_is_about_as_likely() -> None:
    stage, trials = mask(), 4800
    counts: dict[tuple[int, ...], int] = {}
    for step in range(trials):
        order = tuple(stage.forward(torch.arange(4), step).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    expected = trials / 24
    # chi-square, 23 degrees of freedom: p < 1e-4 above
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 58


def test_the_words_are_the_rfc_8439_keystream_of_key_zero_counter_and_step() -> None:
    zero = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert words(bytes(32), 0, 8).tobytes().hex() == zero  # appendix A.1, test vector 1
    # the same key and nonce with counter 1: test vector 2
    second = words(bytes(32), 0, 16)[8:].tobytes().hex()
    assert second.startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed")


def test_the_nonce_is_the_step_in_96_bits_after_a_32_bit_counter() -> None:
    """RFC 8439 2.3.2 has nonce 00 00 00 09 00 00 00 4a 00 00 00 00 and counter 1: block 1 of that
    step's stream.
    """
    key = bytes(range(32))
    step = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
    block = words(key, step, 16)[8:].tobytes()
    theirs = "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    assert block.hex().startswith(theirs)
    for number in (0, 1, 2**32, 2**95):
        nonce = bytes(4) + number.to_bytes(12, "little")
        stream = Cipher(ChaCha20(key, nonce), mode=None).encryptor().update(bytes(800))
        assert words(key, number, 100).tobytes() == stream
        order = mask(key).forward(torch.arange(100), number).numpy()
        assert np.array_equal(order, np.argsort(np.frombuffer(stream, "<u8")))


@pytest.mark.parametrize("name", masks.MASKS[1:])
def test_the_seed_is_in_no_text(name: str) -> None:
    seed = bytes(range(65, 97))
    (stage,) = masks.build(name, 8)
    with pytest.raises(UsageError, match="no mask seed yet"):
        stage.inverse(torch.zeros(stage.width(8) if name == "rotation" else 8), 1)  # type: ignore[attr-defined]
    stage.unlock(seed)  # type: ignore[attr-defined]
    stage.forward(torch.zeros(8), 1)
    assert "seed hidden" in repr(stage)
    for text in (repr(stage), str(stage), f"{Pipeline([stage]).stages}", f"{[stage]!r}"):
        assert seed.hex() not in text
        assert seed.decode() not in text
        assert str(int.from_bytes(seed, "little")) not in text


def signed(seed: bytes = bytes(range(32))) -> masks.SignedPermutation:
    stage = masks.SignedPermutation()
    stage.unlock(seed)
    return stage


@given(
    st.integers(1, 300),
    st.integers(0, 4),
    st.integers(0, 2**62),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_a_signed_permutation_is_undone_bit_for_bit_and_keeps_magnitudes(
    d: int, b: int, step: int, dtype: torch.dtype
) -> None:
    rows = (torch.arange(b * d).view(b, d) - d // 2).to(dtype)
    kept = rows.clone()
    there = signed().forward(rows, step)
    assert torch.equal(there.abs().sort(-1).values, rows.abs().sort(-1).values)
    assert torch.equal(signed().inverse(there, step), rows)
    assert torch.equal(rows, kept)
    assert there.dtype == dtype
    if b:
        assert torch.equal(signed().inverse(there[0], step), rows[0])


def test_a_signed_permutation_is_the_permutation_with_a_streams_signs() -> None:
    d, step, rows = 1000, 5, torch.arange(1.0, 1001.0)
    nonce = bytes(4) + step.to_bytes(8, "little") + (1).to_bytes(4, "little")
    data = Cipher(ChaCha20(bytes(range(32)), nonce), mode=None).encryptor().update(bytes(d))
    flips = torch.tensor([1.0 - 2 * ((data[k // 8] >> (k % 8)) & 1) for k in range(d)])
    assert torch.equal(signed().forward(rows, step), mask().forward(rows, step) * flips)


def test_every_signed_order_of_three_is_about_as_likely() -> None:
    stage, trials = signed(), 4800
    counts: dict[tuple[float, ...], int] = {}
    for step in range(trials):
        found = tuple(stage.forward(torch.arange(1.0, 4.0), step).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 48
    # chi-square, 47 degrees of freedom: p < 1e-4 above
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 91


@pytest.mark.parametrize("distinct", [1, 7, 500, 2**62])
@pytest.mark.parametrize("shift", [0, 40])
@pytest.mark.parametrize("count", [0, 1, 2, 5000])
def test_words_that_agree_are_ordered_alike_on_every_machine(
    distinct: int, shift: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the whole word and then by place: the stable order."""
    drawn = np.random.default_rng(0).integers(0, distinct, count).astype(np.uint64)
    keys = drawn << np.uint64(shift)
    monkeypatch.setattr(stream, "words", lambda *_: keys)
    expected = sorted(range(count), key=lambda k: int(keys[k]))
    assert stream.order(bytes(32), 0, count).tolist() == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 1000])
def test_a_device_draws_the_same_order_and_signs(count: int) -> None:
    seed, device = bytes(range(32)), torch.device("cpu")
    order = stream.order_there(seed, 7, count, device)
    assert order.tolist() == stream.order(seed, 7, count).tolist()
    signs = stream.signs_there(seed, 7, count, stream.SIGNS, device)
    assert signs.tolist() == stream.signs(seed, 7, count, stream.SIGNS).tolist()
    assert signs.dtype == torch.float32


def test_a_device_orders_words_that_agree_as_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.array([3, 2**64 - 1, 0, 2**63, 3, 2**63 - 1, 0, 2**63], dtype=np.uint64)
    there = torch.from_numpy(keys.view(np.int64))
    monkeypatch.setattr(stream, "words", lambda *arguments: keys)
    monkeypatch.setattr(stream, "words_there", lambda *arguments: there)
    order = stream.order_there(bytes(32), 0, len(keys), torch.device("cpu"))
    assert order.tolist() == stream.order(bytes(32), 0, len(keys)).tolist()
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()


def test_the_order_of_a_large_model_is_the_stable_argsort_of_its_words() -> None:
    for step in range(3):  # words agree in their upper 43 bits in about every sixth
        expected = np.argsort(words(bytes(32), step, 1_663_370), kind="stable")
        assert np.array_equal(stream.order(bytes(32), step, 1_663_370), expected)


@pytest.mark.parametrize("name", ["permutation", "signed-permutation", "rotation", "haar"])
@pytest.mark.parametrize(("b", "d"), [(7, 64), (3, 500), (900, 300)])
def test_rows_that_nobody_else_keeps_are_overwritten(name: str, b: int, d: int) -> None:
    """The same numbers in the same memory; without leave, the rows stay as they were."""
    (stage,) = masks.build(name, d)
    stage.unlock(bytes(32))  # type: ignore[attr-defined]
    rows = torch.randn(b, d, generator=torch.Generator().manual_seed(0))
    kept, pipeline = rows.clone(), Pipeline([stage])
    expected = pipeline.forward(rows, 2)
    assert torch.equal(rows, kept)
    n = expected.shape[1]
    buffer = torch.zeros(b, n)
    buffer[:, :d] = rows
    there = pipeline.forward(buffer, 2, overwrite=True)
    assert there.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(there, expected, rtol=0, atol=2e-6)
    alone = pipeline.forward(kept[0].clone() if n == d else kept[0], 2, overwrite=True)
    torch.testing.assert_close(alone, expected[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("signed", [False, True])
def test_wide_rows_are_gathered_one_by_one_to_the_same_bits(
    threads: int, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WIDE_ROW", 50)
    monkeypatch.setattr(stream, "MANY_NUMBERS", 1)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 50)).astype(np.float32)
    positions = rng.permutation(50)
    factors = rng.choice([-1.0, 1.0], 50).astype(np.float32)
    expected = rows[:, positions]
    if signed:
        expected = expected * factors
    table = torch.from_numpy(rows.copy())
    signs = torch.from_numpy(factors) if signed else None
    with cpu_threads(threads):
        stream.gather(table, torch.from_numpy(positions), signs)
        assert torch.get_num_threads() == threads
    assert np.array_equal(table.numpy(), expected)


def test_padding_is_stated_in_bytes_and_no_mask_is_called_encryption() -> None:
    assert masks.describe("rotation", 159_010, 4).padding_bytes == 4 * (159_744 - 159_010)
    for name in ("none", "permutation", "signed-permutation"):
        assert masks.describe(name, 159_010, 8).padding_bytes == 0
    assert "Gram" not in masks.INFO["rotation"].shows
    for name in masks.MASKS[1:]:
        assert "obfuscation" in masks.INFO[name].not_covered
        assert "encrypt" not in masks.INFO[name].not_covered + masks.INFO[name].shows


def test_masks_are_known_by_name_and_each_is_explained() -> None:
    assert masks.build("none") == ()
    for name in masks.MASKS[1:]:
        (stage,) = masks.build(name, 8)
        assert (stage.kind, stage.name) == (Kind.MASK, name)
    assert set(masks.INFO) == set(masks.MASKS)
    with pytest.raises(UsageError, match="did you mean 'permutation'"):
        masks.build("permutations")
    one, other = masks.build("permutation"), masks.build("permutation")
    assert one[0] is not other[0]
