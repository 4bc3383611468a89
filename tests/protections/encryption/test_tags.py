"""Tags bind a sum of ciphertexts: linear, secret, and others for every other ciphertext."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from securecluster.errors import FrameError
from securecluster.protections.encryption import ciphers
from securecluster.protections.encryption.parameters import Parameters
from securecluster.protections.encryption.tags import (
    TAGS,
    LinearTags,
    as_text,
    from_text,
    tag_key,
    text_bytes,
)


@pytest.fixture(scope="module")
def cipher() -> ciphers.SecretCipher:
    return ciphers.SecretCipher.generate(Parameters())


def tags_of(cipher: ciphers.PublicCipher) -> LinearTags:
    return LinearTags(cipher.parameters, b"k" * 32)


def row(cipher: ciphers.PublicCipher, seed: int = 0) -> bytes:
    draw = np.random.default_rng(seed)
    integers = draw.integers(-9, 10, cipher.parameters.slots)
    return cipher.encrypt(integers / 9)


def test_tags_of_a_sum_are_the_sum_of_the_tags(cipher: ciphers.SecretCipher) -> None:
    tags = tags_of(cipher)
    rows = [row(cipher, k) for k in range(5)]
    total = ciphers.CiphertextSum(cipher)
    for data in rows:
        total.add([data])
    (data,) = total.serialized()
    single = [tags.of(cipher.coefficients(part)) for part in rows]
    assert tags.of(cipher.coefficients(data)) == tags.added(single)
    assert tags.of(cipher.coefficients(data)) != tags.added(single[1:])
    assert len(single[0]) == TAGS * len(ciphers.data_primes(cipher.parameters))


def test_a_tag_is_an_inner_product_modulo_the_prime(cipher: ciphers.SecretCipher) -> None:
    """Of Python's integers, with the forms that the tags of unit vectors show."""
    tags = tags_of(cipher)
    coefficients = cipher.coefficients(row(cipher))
    primes = ciphers.data_primes(cipher.parameters)
    places = (0, 1, cipher.parameters.degree, 2 * cipher.parameters.degree - 1)
    sparse = np.zeros_like(coefficients)
    expected = [0] * TAGS * len(primes)
    for prime in range(len(primes)):
        for place in places:
            unit = np.zeros_like(coefficients)
            unit[prime, place] = 1
            sparse[prime, place] = coefficients[prime, place]
            for k, form in enumerate(tags.of(unit)):
                expected[k] += form * int(coefficients[prime, place])
    assert tags.of(sparse) == [e % primes[k // TAGS] for k, e in enumerate(expected)]


def test_the_moduli_are_primes_of_the_size_that_is_asked_for(cipher: ciphers.SecretCipher) -> None:
    parameters = cipher.parameters
    primes = ciphers.data_primes(parameters)
    assert [prime.bit_length() for prime in primes] == list(parameters.moduli[:-1])
    for number, prime in enumerate(primes):
        assert prime % (2 * parameters.degree) == 1
        assert int(cipher.coefficients(row(cipher))[number].max()) < prime
        # 2^-93 for two tags of a prime, as the module says
        assert prime**TAGS > 1 << 93


def test_every_changed_coefficient_changes_all_tags_of_its_prime(
    cipher: ciphers.SecretCipher,
) -> None:
    tags = tags_of(cipher)
    coefficients = cipher.coefficients(row(cipher))
    before = tags.of(coefficients)
    draw = np.random.default_rng(3)
    for _ in range(20):
        changed = coefficients.copy()
        prime = int(draw.integers(len(changed)))
        changed[prime, draw.integers(changed.shape[1])] ^= 1 << int(draw.integers(40))
        differ = [old != new for old, new in zip(before, tags.of(changed), strict=True)]
        assert differ == [k // TAGS == prime for k in range(len(before))]


def test_tags_of_equal_numbers_are_uniform(cipher: ciphers.SecretCipher) -> None:
    """To whoever has the key of the tags, and the secret key, they tell nothing of a row."""
    tags = tags_of(cipher)
    zeros = np.zeros(cipher.parameters.slots)
    primes = ciphers.data_primes(cipher.parameters)
    shares: list[Any] = []
    for _ in range(100):
        found = tags.of(cipher.coefficients(cipher.encrypt(zeros)))
        shares.append([tag / primes[k // TAGS] for k, tag in enumerate(found)])
    for column in np.array(shares).T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    assert np.abs(np.corrcoef(np.array(shares).T) - np.eye(len(shares[0]))).max() < 0.5


def test_keys_differ_with_seed_run_and_public_key() -> None:
    parts = ((b"s", "run", b"f"), (b"t", "run", b"f"), (b"s", "other", b"f"), (b"s", "run", b"g"))
    keys = {tag_key(seed * 32, run, public * 32) for seed, run, public in parts}
    assert len(keys) == 4
    parameters = Parameters()
    ones = np.ones((2, 2 * parameters.degree), np.int64)
    assert len({tuple(LinearTags(parameters, key).of(ones)) for key in keys}) == 4
    assert repr(LinearTags(parameters, b"k" * 32)) == "LinearTags(key hidden)"


def test_a_box_has_the_tags_of_its_ciphertexts() -> None:
    parameters = Parameters()
    width = TAGS * (len(parameters.moduli) - 1)
    tags = [[k + 1 << 40 for k in range(width)], [7] * width]
    text = as_text(b"k" * 32, tags)
    assert len(text) == text_bytes(2, parameters)
    assert from_text(text, 2, parameters) == (b"k" * 32, tags)
    for count in (1, 3):
        with pytest.raises(FrameError, match="other tags than its ciphertexts need"):
            from_text(text, count, parameters)
