"""Parameters, ciphers and packing: what is refused, exact sums, and garbage that is noticed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.homomorphic import ciphers
from securecluster.privacy.homomorphic.ciphers import (
    NOT_SAVED,
    CiphertextSum,
    PublicCipher,
    SecretCipher,
    tenseal,
)
from securecluster.privacy.homomorphic.packing import GRID_BITS, FieldShape, Layout, pack, unpack
from securecluster.privacy.homomorphic.parameters import (
    BFV,
    CKKS,
    MOST_MEMBERS,
    Parameters,
    default_parameters,
)

SCHEMES = (BFV, CKKS)
LAYOUT = Layout((FieldShape("delta", 32, (30, 70)), FieldShape("size", 64, ())))
BITS = {"delta": 32, "size": 64}
CLIENTS = 5
LARGEST = {"delta": ((1 << 31) - 1) // CLIENTS, "size": ((1 << 63) - 1) // CLIENTS}


@pytest.fixture(scope="module", params=SCHEMES)
def cipher(request: pytest.FixtureRequest) -> SecretCipher:
    return SecretCipher.generate(default_parameters(request.param))


def rows(count: int = CLIENTS) -> list[dict[str, Any]]:
    """Integers up to the largest ones, which occur in both signs."""
    draw = np.random.default_rng(1)
    made = []
    for k in range(count):
        row = {
            shape.name: draw.integers(-LARGEST[shape.name], LARGEST[shape.name], shape.shape)
            for shape in LAYOUT.fields
        }
        row["delta"][0, :2] = (LARGEST["delta"], -LARGEST["delta"])
        row["size"] = np.array(LARGEST["size"] if k else -LARGEST["size"])
        made.append(row)
    return made


def encrypted_sum(cipher: PublicCipher, clients: list[dict[str, Any]]) -> list[bytes]:
    public = PublicCipher(cipher.parameters, cipher.public)  # no secret key is needed
    total = CiphertextSum(public)
    for row in clients:
        slots = pack(row, LAYOUT, LARGEST, cipher.parameters)
        total.add([public.encrypt(numbers) for numbers in slots])
    return total.serialized()


def decrypted(cipher: SecretCipher, data: list[bytes], members: int = CLIENTS) -> dict[str, Any]:
    slots = [cipher.decrypt(ciphertext) for ciphertext in data]
    return unpack(slots, LAYOUT, LARGEST, cipher.parameters, members)


def test_sums_are_exact_under_bfv_and_within_the_grid_under_ckks(cipher: SecretCipher) -> None:
    clients = rows()
    sums = decrypted(cipher, encrypted_sum(cipher, clients))
    truth = {name: sum(row[name].astype(object) for row in clients) for name in BITS}
    assert np.array_equal(sums["size"], truth["size"])  # in limbs, exact under both
    error = np.abs(sums["delta"] - truth["delta"]).max() / LARGEST["delta"]
    if cipher.parameters.scheme == BFV:
        assert error == 0
    else:
        assert 0 < error < 0.55 * 2.0**-GRID_BITS


def test_ckks_errs_by_less_than_a_hundredth_of_the_grid_before_it_is_rounded() -> None:
    cipher = SecretCipher.generate(default_parameters(CKKS))
    draw = np.random.default_rng(0).uniform(-1, 1, (20, cipher.parameters.slots))
    total = CiphertextSum(cipher)
    for numbers in draw:
        total.add([cipher.encrypt(numbers)])
    (data,) = total.serialized()
    error = np.abs(cipher.decrypt(data) - draw.sum(0)).max()
    assert 1e-10 < error < 5e-8 < 2.0**-GRID_BITS / 10


def test_numbers_share_ciphertexts(cipher: SecretCipher) -> None:
    slots = cipher.parameters.slots
    assert Layout((FieldShape("delta", 32, (10,)),)).ciphertexts(cipher.parameters) == 1
    assert Layout((FieldShape("delta", 32, (slots - 1,)),)).ciphertexts(cipher.parameters) == 1
    assert Layout((FieldShape("delta", 32, (slots,)),)).ciphertexts(cipher.parameters) == 2
    assert len(pack(rows()[0], LAYOUT, LARGEST, cipher.parameters)) == LAYOUT.ciphertexts(
        cipher.parameters
    )


@pytest.mark.parametrize("claimed", [CLIENTS - 1, CLIENTS + 1, 1])
def test_a_sum_over_other_clients_than_it_is_said_to_be_is_noticed(
    cipher: SecretCipher, claimed: int
) -> None:
    with pytest.raises(FrameError, match="number of contributors is not"):
        decrypted(cipher, encrypted_sum(cipher, rows()), claimed)


def test_a_wrong_key_gives_garbage_silently_and_is_noticed(cipher: SecretCipher) -> None:
    data = encrypted_sum(cipher, rows())
    other = SecretCipher.generate(cipher.parameters)
    other.decrypt(data[0])  # TenSEAL raises nothing
    with pytest.raises(FrameError, match="another key"):
        decrypted(other, data)


def test_altered_ciphertexts_decrypt_to_garbage_that_is_noticed(cipher: SecretCipher) -> None:
    data = encrypted_sum(cipher, rows())
    middle = len(data[0]) // 2
    altered = data[0][:middle] + bytes(64) + data[0][middle + 64 :]
    with pytest.raises(FrameError):
        decrypted(cipher, [altered, *data[1:]])


def test_sums_beyond_the_range_of_their_clients_are_noticed(cipher: SecretCipher) -> None:
    slots = pack(rows()[0], LAYOUT, LARGEST, cipher.parameters)
    slots[0][1] *= 1.01
    for k in (0, 1):
        with pytest.raises(FrameError, match="delta of a decrypted sum is beyond its range"):
            unpack(slots, LAYOUT, LARGEST, cipher.parameters, 1)
        slots = pack(rows()[0], LAYOUT, LARGEST, cipher.parameters)
        slots[0][1] = np.nan if cipher.parameters.scheme == CKKS else 1 << 40 + k
    slots = pack(rows()[0], LAYOUT, LARGEST, cipher.parameters)
    slots[-1][-1] = 1
    with pytest.raises(FrameError, match="an unused slot"):
        unpack(slots, LAYOUT, LARGEST, cipher.parameters, 1)


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_bytes_of_another_length_are_refused_before_they_are_loaded(
    cipher: SecretCipher, size: int
) -> None:
    # TenSEAL itself loads empty bytes
    with pytest.raises(FrameError, match=r"a ciphertext has 1 to .* bytes"):
        CiphertextSum(cipher).add([bytes(size)])
    with pytest.raises(FrameError, match="public key of the encryption has 1 to"):
        PublicCipher(cipher.parameters, bytes(size))


def test_other_bytes_and_other_parameters_are_refused(cipher: SecretCipher) -> None:
    for data in (b"x", bytes(100), cipher.public[:100]):
        with pytest.raises(FrameError):
            CiphertextSum(cipher).add([data])
        with pytest.raises(FrameError):
            PublicCipher(cipher.parameters, data)
    (other,) = {BFV, CKKS} - {cipher.parameters.scheme}
    with pytest.raises(FrameError):
        PublicCipher(default_parameters(other), cipher.public)


def test_keys_beyond_the_public_one_are_refused(cipher: SecretCipher) -> None:
    secret_alone = cipher._context.serialize(**{**NOT_SAVED, "save_secret_key": True})
    with pytest.raises(FrameError, match="other keys came"):
        PublicCipher(cipher.parameters, secret_alone)
    with pytest.raises(FrameError, match="refused"):
        PublicCipher(cipher.parameters, cipher.secret)
    assert repr(cipher) == f"SecretCipher({cipher.fingerprint.hex()[:16]}…)"
    assert len(cipher.public) < 130_000  # no keys for rotations or products


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "rsa"}, "bfv or ckks"),
        ({"scheme": CKKS, "scale_bits": 20, "moduli": (40, 20, 40)}, "errs by about"),
        ({"scheme": CKKS, "scale_bits": 20, "moduli": (40, 20, 40), "degree": 8192}, "8e-03"),
        ({"scheme": CKKS, "scale_bits": 40, "moduli": (60, 55)}, "not secure"),
        ({"scheme": CKKS, "scale_bits": 45}, "do not hold sums"),
        ({"scheme": CKKS, "scale_bits": 40, "plain_modulus": 5}, "no plain modulus"),
        ({"scheme": CKKS, "scale_bits": 40, "degree": 1024}, "not offered"),
        ({"scheme": CKKS, "scale_bits": 40, "moduli": (54,)}, "two or more"),
        ({"scheme": BFV, "plain_modulus": (1 << 33) + 1}, "cannot pack"),
        ({"scheme": BFV, "plain_modulus": 1032193}, "does not hold a sum"),
        ({"scheme": BFV, "plain_modulus": 8590090241, "moduli": (45, 45)}, "no room"),
        ({"scheme": BFV, "plain_modulus": 8590090241, "scale_bits": 40}, "no scale"),
    ],
)
def test_parameters_that_are_not_secure_or_not_precise_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Parameters(**options)


def test_the_noise_of_the_largest_sum_leaves_bfv_exact() -> None:
    """4096 ciphertexts: doubled twelve times, so that their noise adds up in the worst way."""
    cipher = SecretCipher.generate(default_parameters(BFV))
    numbers = np.arange(cipher.parameters.slots) - cipher.parameters.slots // 2
    data = cipher.encrypt(numbers)
    for doubled in range(12):
        total = CiphertextSum(cipher)
        total.add([data])
        total.add([cipher.encrypt(0 * numbers) if doubled > 8 else data])
        (data,) = total.serialized()
    assert np.array_equal(cipher.decrypt(data), numbers << 9)
    with pytest.raises(UsageError, match=f"1 to {MOST_MEMBERS}"):
        unpack([numbers], LAYOUT, LARGEST, cipher.parameters, MOST_MEMBERS + 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "delta:32:",
        "delta:32:30x70;size:64:;",
        "delta:64:3",
        "other:32:3",
        "delta:32:3;delta:32:3",
        "delta:32:03",
        "delta:32:9999999999x9999999999",
        "delta:32:3" + " " * 5000,
        "delta:32:-3",
    ],
)
def test_other_layouts_are_refused(text: str) -> None:
    if text == "delta:32:":  # a single number is a layout
        assert Layout.parse(text, BITS).slots == 1
        return
    with pytest.raises(FrameError, match="describes no fields"):
        Layout.parse(text, BITS)


def test_layouts_are_read_as_they_are_written() -> None:
    assert Layout.parse(str(LAYOUT), BITS) == LAYOUT


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(UsageError, match=r"pip install tenseal.*secagg"):
        tenseal()


def test_tenseal_is_imported_where_it_is_needed_first() -> None:
    package = Path(ciphers.__file__).parents[2]
    importing = [p for p in package.rglob("*.py") if "import tenseal" in p.read_text()]
    assert importing == [Path(ciphers.__file__)]
    module = ast.parse(importing[0].read_text())
    assert not any("tenseal" in ast.unparse(n) for n in module.body if isinstance(n, ast.Import))
