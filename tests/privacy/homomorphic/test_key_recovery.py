"""A full-precision CKKS decryption gives the secret key away (Li and Micciancio 2021), and sums as
they are released do not. The algebra is that of the attack `ckks-release`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securecluster.attacks.ckks_release import (
    SealReader,
    Sums,
    as_released,
    new_sums,
    recovered_key,
    rounded_release,
)
from securecluster.privacy.homomorphic.packing import GRID_BITS


@pytest.fixture(scope="module")
def sums() -> Sums:
    """Two sums of ciphertexts, and their true values."""
    return new_sums()


def test_two_full_precision_decryptions_give_the_secret_key(sums: Sums, tmp_path: Path) -> None:
    seal = SealReader(tmp_path)
    released = [sums.cipher.decrypt(data) for data in sums.ciphertexts]
    found = recovered_key(seal, sums.ciphertexts, released)
    assert np.array_equal(found, seal.secret(sums.cipher))


def test_sums_as_they_are_released_do_not(sums: Sums, tmp_path: Path) -> None:
    seal = SealReader(tmp_path)
    secret = seal.secret(sums.cipher)
    released = []
    for data, truth in zip(sums.ciphertexts, sums.truths, strict=True):
        released.append(rounded_release(sums.cipher, data))
        off = np.abs(released[-1] - as_released(truth)).max()
        assert off < 2.0**-20  # half a step of the grid, and noise
        steps = released[-1] * 2.0**GRID_BITS
        assert np.abs(steps - np.rint(steps)).max() < 0.01  # nothing between two steps
    found = recovered_key(seal, sums.ciphertexts, released)
    assert np.mean(found == secret) < 0.01
    # one bit beyond a float's 53 would do no more harm than the noise: it is its digits that tell
    nearly = [np.round(sums.cipher.decrypt(data), 9) for data in sums.ciphertexts]
    assert np.mean(recovered_key(seal, sums.ciphertexts, nearly) == secret) < 0.01
