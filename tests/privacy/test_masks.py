"""The permutation: exact, fresh, uniform, and drawn from ChaCha20 as it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st

from securecluster.errors import UsageError
from securecluster.privacy.masks import INFO, MASKS, Permutation, build
from securecluster.privacy.stages import Kind, Pipeline
from securecluster.privacy.stream import words


def mask(seed: bytes = bytes(range(32))) -> Permutation:
    stage = Permutation()
    stage.unlock(seed)
    return stage


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 300),
    st.integers(0, 4),
    st.integers(0, 2**62),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_forward_and_inverse_undo_each_other_bit_for_bit(d: int, b: int, step: int, seed: bytes, dtype: torch.dtype) -> None:
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
    orders = [stage.forward(values, step) for step in range(6)] + [mask(bytes(32)).forward(values, 0)]
    for k, one in enumerate(orders):
        assert (one == values).float().mean() < 0.01
        for other in orders[:k]:
            assert (one == other).float().mean() < 0.01
    assert stage.forward(torch.arange(4), 1).tolist() != stage.forward(torch.arange(5), 1).tolist()[:4] or not torch.equal(
        stage.forward(torch.arange(1999), 1), orders[1][:1999]
    )


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
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 58  # chi-square, 23 degrees of freedom: p < 1e-4 above


def test_the_words_are_the_rfc_8439_keystream_of_key_zero_counter_and_step() -> None:
    zero = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert words(bytes(32), 0, 8).tobytes().hex() == zero  # appendix A.1, test vector 1
    second = words(bytes(32), 0, 16)[8:].tobytes().hex()  # the same key and nonce with counter 1: test vector 2
    assert second.startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed")


def test_the_nonce_is_the_step_in_96_bits_after_a_32_bit_counter() -> None:
    """RFC 8439 2.3.2 has nonce 00 00 00 09 00 00 00 4a 00 00 00 00 and counter 1: block 1 of that step's stream."""
    key = bytes(range(32))
    step = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
    block = words(key, step, 16)[8:].tobytes()
    assert block.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e")
    for number in (0, 1, 2**32, 2**95):
        nonce = bytes(4) + number.to_bytes(12, "little")
        stream = Cipher(ChaCha20(key, nonce), mode=None).encryptor().update(bytes(800))
        assert words(key, number, 100).tobytes() == stream
        assert np.array_equal(mask(key).forward(torch.arange(100), number).numpy(), np.argsort(np.frombuffer(stream, "<u8")))


def test_the_seed_is_in_no_text() -> None:
    seed = bytes(range(65, 97))
    stage = mask(seed)
    stage.forward(torch.zeros(3), 1)
    for text in (repr(stage), str(stage), f"{Pipeline([stage]).stages}", f"{[stage]!r}"):
        assert seed.hex() not in text
        assert seed.decode() not in text
        assert str(int.from_bytes(seed, "little")) not in text
    with pytest.raises(UsageError) as caught:
        Permutation().inverse(torch.zeros(3), 1)
    assert "no mask seed yet" in str(caught.value)


def test_masks_are_known_by_name_and_each_is_explained() -> None:
    assert build("none") == ()
    (stage,) = build("permutation")
    assert (stage.kind, stage.name) == (Kind.MASK, "permutation")
    assert set(INFO) == set(MASKS)
    with pytest.raises(UsageError, match="did you mean 'permutation'"):
        build("permutations")
    one, other = build("permutation"), build("permutation")
    assert one[0] is not other[0]
