"""A full-precision CKKS decryption gives the secret key away (Li and Micciancio 2021), and sums as
they are released show none of its noise. The algebra is that of the attack `ckks-release`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securecluster.attacks.ckks_release import (
    LARGEST,
    MEMBERS,
    SealReader,
    Sums,
    exact_release,
    new_sums,
    recovered_key,
)


@pytest.fixture(scope="module")
def sums() -> Sums:
    """Two sums of ciphertexts, and their true values."""
    return new_sums()


def test_two_full_precision_decryptions_give_the_secret_key(sums: Sums, tmp_path: Path) -> None:
    seal = SealReader(tmp_path)
    released = [sums.cipher.decrypt(data) for data in sums.ciphertexts]
    found = recovered_key(seal, sums.ciphertexts, released)
    assert np.array_equal(found, seal.secret(sums.cipher))


def test_sums_as_they_are_released_show_no_noise_of_the_decryption(
    sums: Sums, tmp_path: Path
) -> None:
    seal = SealReader(tmp_path)
    secret = seal.secret(sums.cipher)
    released = []
    for data, truth in zip(sums.ciphertexts, sums.truths, strict=True):
        # the sum of what clients encrypted, by numpy's integers, as numbers of magnitude 1
        integers = np.concatenate([[MEMBERS * LARGEST["delta"]], truth["delta"]])
        assert np.abs(sums.cipher.decrypt(data) - integers / LARGEST["delta"]).max() > 1e-10
        released.append(exact_release(sums.cipher, data))
        assert np.array_equal(released[-1], integers / LARGEST["delta"])
    found = recovered_key(seal, sums.ciphertexts, released)
    assert np.mean(found == secret) < 0.01
    # one bit beyond a float's 53 would do no more harm than the noise: it is its digits that tell
    nearly = [np.round(sums.cipher.decrypt(data), 9) for data in sums.ciphertexts]
    assert np.mean(recovered_key(seal, sums.ciphertexts, nearly) == secret) < 0.01
