"""Parameters, ciphers and packing: what is refused, exact sums, and garbage that is noticed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

from securecluster.attacks.ckks_release import Textbook
from securecluster.errors import FrameError, UsageError
from securecluster.protections.encryption import ciphers
from securecluster.protections.encryption.ciphers import (
    NOT_SAVED,
    CiphertextSum,
    PublicCipher,
    SecretCipher,
    tenseal,
)
from securecluster.protections.encryption.packing import FieldShape, Layout, pack, unpack
from securecluster.protections.encryption.parameters import (
    MOST_DECRYPTIONS,
    MOST_MEMBERS,
    Parameters,
)

LAYOUT = Layout((FieldShape("delta", 32, (30, 70)), FieldShape("size", 64, ())))
BITS = {"delta": 32, "size": 64}
CLIENTS = 5
# 2^22 is what the numbers of 32 bits of five clients may have
LARGEST = {"delta": 1 << 22, "size": ((1 << 63) - 1) // CLIENTS}


@pytest.fixture(scope="module")
def cipher() -> SecretCipher:
    return SecretCipher.generate(Parameters())


def rows(count: int = CLIENTS) -> list[dict[str, Any]]:
    """Integers up to the largest ones, which occur in both signs."""
    draw = np.random.default_rng(1)
    largest = LARGEST
    made = []
    for k in range(count):
        row = {
            shape.name: draw.integers(-largest[shape.name], largest[shape.name], shape.shape)
            for shape in LAYOUT.fields
        }
        row["delta"][0, :2] = (largest["delta"], -largest["delta"])
        row["size"] = np.array(largest["size"] if k else -largest["size"])
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
    largest = LARGEST
    return unpack(slots, LAYOUT, largest, cipher.parameters, members)


def test_sums_of_integers_are_exact(cipher: SecretCipher) -> None:
    clients = rows()
    sums = decrypted(cipher, encrypted_sum(cipher, clients))
    for name in BITS:
        truth = sum(row[name].astype(object) for row in clients)
        assert np.array_equal(sums[name], truth)


MEMBERS = [1, 16, 256, pytest.param(MOST_MEMBERS, marks=pytest.mark.exhaustive)]


def integers_under(largest: int, slots: int, members: int) -> tuple[Any, Any]:
    """Rows of integers (members, slots), and their sum."""
    draw = np.random.default_rng(members)
    rows = draw.integers(-largest, largest + 1, (members, slots))
    return rows, rows.sum(0)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("members", MEMBERS)
def test_the_noise_of_ciphertexts_is_as_derived(members: int) -> None:
    """The standard deviation of a slot is N √m / (6 Δ).

    At a run's scale a decryption in double precision does not show it; a small scale does.
    """
    cipher = SecretCipher.generate(Textbook(8192, (47, 47, 48), scale_bits=40))
    rows, truth = integers_under(1 << 18, cipher.parameters.slots, members)
    total = CiphertextSum(cipher)
    for row in rows:
        total.add([cipher.encrypt(row / (1 << 18))])
    (data,) = total.serialized()
    measured = np.sqrt(np.mean((cipher.decrypt(data) - truth / (1 << 18)) ** 2))
    deviation = 8192 * members**0.5 / (6 * 2.0**40)
    assert cipher.parameters.error(members) == pytest.approx(deviation, rel=1e-12)
    # over the draw of the key and 4096 slots
    assert measured == pytest.approx(deviation, rel=0.15)


@pytest.mark.few(2)
@pytest.mark.parametrize("members", MEMBERS)
def test_sums_have_flooding_noise_of_a_64th_of_a_step(members: int) -> None:
    parameters = Parameters()
    cipher = SecretCipher.generate(parameters)
    # 2^24 steps for one client, and a bit less for each factor of four: as many as 24 bits hold
    largest = {1: 1 << 24, 16: 1 << 22, 256: 1 << 20, 4096: 1 << 18}[members]
    assert parameters.largest_integer(32, members) == largest
    rows, truth = integers_under(largest, parameters.slots, members)
    total = CiphertextSum(cipher)
    for row in rows:
        total.add([cipher.encrypt(row / largest)])
    (data,) = total.serialized()
    errors = [cipher.flooded(data, members) * largest - truth for _ in range(2)]
    for error in errors:
        assert np.sqrt(np.mean(error**2)) == pytest.approx(1 / 64, rel=0.1)
        assert np.abs(error).max() < 0.1
    # drawn anew each time
    assert abs(np.corrcoef(*errors)[0, 1]) < 0.1
    # what is hidden is 2^39 times smaller, and doubles do not even hold it
    assert np.abs(cipher.decrypt(data) * largest - truth).max() < 1e-4


def test_flooding_hides_what_it_is_said_to() -> None:
    """The bound beside the exact total variation distance of Gaussians that are shifted."""
    parameters = Parameters()
    # ratio of the two standard deviations, of N = 8192, Δ = 2^80 and one member
    ratio = 2.0**-30 / (8192 / 6 * 2.0**-80)
    assert np.log2(ratio) == pytest.approx(39.58, abs=0.01)
    for members in (1, 4, 6, 1000, 4096):
        assert parameters.flooding(members) / parameters.error(members) >= 0.999 * ratio
    # 2^20 ciphertexts of 4096 slots: of a shift vector of norm t the variation is 2 Φ(t / 2) − 1
    norm = mpmath.sqrt(mpmath.mpf(2) ** 20 * 4096) / ratio
    exact = float(2 * mpmath.ncdf(norm / 2) - 1)
    bound = parameters.advantage(1, MOST_DECRYPTIONS)
    assert exact < bound < 1.3 * exact
    assert np.log2(bound) == pytest.approx(-24.58, abs=0.01)
    assert np.log2(parameters.advantage(1, 1)) == pytest.approx(-34.58, abs=0.01)


def refusals(cipher: SecretCipher, data: bytes, slot: int, flooded: bool) -> float:
    """Search for the error of a slot by 12 sums that are off by nearly a quarter of a step.

    Returns:
        What the search finds, in steps.
    """
    largest = LARGEST["delta"]
    low, high = -0.25, 0.25
    for _ in range(12):
        middle = (low + high) / 2
        offset = np.zeros(cipher.parameters.slots)
        offset[slot] = (0.25 - middle) / largest
        vector = cipher.load(data)
        vector += offset.tolist()
        changed = vector.serialize()
        numbers = cipher.flooded(changed, CLIENTS) if flooded else cipher.decrypt(changed)
        try:
            unpack([numbers], Layout((FieldShape("delta", 32, (9,)),)), LARGEST, PLAIN, 1)
        except FrameError as error:
            assert "lies between two integers" in str(error)
            low = middle  # the error is larger: together they are beyond a quarter
        else:
            high = middle
    return (low + high) / 2


PLAIN = Textbook(4096, (53, 53), scale_bits=40)


@pytest.mark.few(1)
@pytest.mark.parametrize("flooded", [False, True])
def test_refusals_tell_nothing_of_the_error_of_a_slot_once_it_is_flooded(flooded: bool) -> None:
    """Without flooding 12 of them find it to a thousandth of a step; with it they find the noise.

    At a small scale, at which the error can be measured, and which no run has.
    """
    cipher = SecretCipher.generate(PLAIN)
    zeros = np.zeros(PLAIN.slots)
    zeros[0] = 1
    found, true = [], []
    for _ in range(16 if flooded else 2):
        data = cipher.encrypt(zeros)
        errors = (cipher.decrypt(data) - zeros) * LARGEST["delta"]
        for slot in (1, 5, 9):
            found.append(refusals(cipher, data, slot, flooded))
            true.append(errors[slot])
    off = np.sqrt(np.mean(np.subtract(found, true) ** 2))
    if not flooded:
        assert off < 1e-3
    else:
        # flooding has 1/64 of a step, four times what it hides at this scale; of 48 draws of either
        # chance leaves more than 1.5 times
        assert off > 1.5 * np.sqrt(np.mean(np.square(true)))


def test_with_more_members_smaller_integers_are_summed() -> None:
    parameters = Parameters()
    assert [parameters.grid_bits(m) for m in (1, 2, 4, 5, 64, 65, 256, 257, 4096)] == [
        *(24, 23, 23, 22, 21, 20, 20, 19, 18)
    ]
    assert parameters.largest_integer(64, 4096) is None


def test_a_decryption_between_two_integers_is_not_released() -> None:
    """A quarter of a step is what noise never reaches, and half a step would be another sum."""
    parameters = Parameters()
    (row,) = rows(1)
    for off, refused in ((0.2, False), (-0.2, False), (0.3, True), (-0.3, True), (0.5, True)):
        for field, position, unit in (("delta", 1, 1 << 22), ("size", 2101, 1 << 16)):
            slots = pack(row, LAYOUT, LARGEST, parameters)
            # the first slot of each of the two ciphertexts counts contributors
            flat = slots[(position - 1) // (parameters.slots - 1)]
            flat[1 + (position - 1) % (parameters.slots - 1)] += off / unit
            if refused:
                with pytest.raises(FrameError, match=f"{field} .* lies between two integers"):
                    unpack(slots, LAYOUT, LARGEST, parameters, 1)
            else:
                sums = unpack(slots, LAYOUT, LARGEST, parameters, 1)
                assert np.array_equal(sums[field], row[field])


def test_numbers_share_ciphertexts(cipher: SecretCipher) -> None:
    slots = cipher.parameters.slots
    assert Layout((FieldShape("delta", 32, (10,)),)).ciphertexts(cipher.parameters) == 1
    assert Layout((FieldShape("delta", 32, (slots - 1,)),)).ciphertexts(cipher.parameters) == 1
    assert Layout((FieldShape("delta", 32, (slots,)),)).ciphertexts(cipher.parameters) == 2
    packed = pack(rows()[0], LAYOUT, LARGEST, cipher.parameters)
    assert len(packed) == LAYOUT.ciphertexts(cipher.parameters)


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
    (row,) = rows(1)
    largest = LARGEST
    one = 1 / largest["delta"]
    for beyond in (largest["delta"] + 1, -largest["delta"] - 1, 1 << 40):
        slots = pack(row, LAYOUT, largest, cipher.parameters)
        slots[0][1] = beyond * one
        with pytest.raises(FrameError, match="delta of a decrypted sum is beyond its range"):
            unpack(slots, LAYOUT, largest, cipher.parameters, 1)
    for number in (np.nan, np.inf):
        slots[0][1] = number
        with pytest.raises(FrameError, match="beyond its range"):
            unpack(slots, LAYOUT, largest, cipher.parameters, 1)
    slots = pack(row, LAYOUT, largest, cipher.parameters)
    slots[-1][-1] = 1
    with pytest.raises(FrameError, match="an unused slot"):
        unpack(slots, LAYOUT, largest, cipher.parameters, 1)


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
    with pytest.raises(FrameError):
        PublicCipher(Textbook(4096, (53, 53), scale_bits=40), cipher.public)


def test_keys_beyond_the_public_one_are_refused(cipher: SecretCipher) -> None:
    secret_alone = cipher._context.serialize(**{**NOT_SAVED, "save_secret_key": True})
    with pytest.raises(FrameError, match="other keys came"):
        PublicCipher(cipher.parameters, secret_alone)
    with pytest.raises(FrameError, match="refused"):
        PublicCipher(cipher.parameters, cipher.secret)
    assert repr(cipher) == f"SecretCipher({cipher.fingerprint.hex()[:16]}…)"
    assert len(cipher.public) < 350_000  # no keys for rotations or products
    with pytest.raises(FrameError, match="has no secret key"):
        SecretCipher(cipher.parameters, cipher.public)


def test_a_public_key_has_one_encoding(cipher: SecretCipher) -> None:
    """A field that parsers skip would give one key two fingerprints."""
    field_15 = b"\x78\x01"
    with pytest.raises(FrameError, match="not in its canonical form"):
        PublicCipher(cipher.parameters, cipher.public + field_15)


def test_rows_of_another_length_are_refused_and_the_sum_is_as_it_was(cipher: SecretCipher) -> None:
    slots = cipher.parameters.slots
    with pytest.raises(UsageError, match=f"holds {slots} numbers, not"):
        cipher.encrypt(np.zeros(slots - 1))
    ones = cipher.encrypt(np.ones(slots))
    total = CiphertextSum(cipher)
    total.add([ones, ones])
    for other in ([ones], [ones] * 3):
        with pytest.raises(FrameError, match=f"{len(other)} ciphertexts cannot be added to 2"):
            total.add(other)
    assert [np.rint(cipher.decrypt(data)).sum() for data in total.serialized()] == [slots, slots]


def test_sums_in_other_ciphertexts_and_beyond_64_bits_are_refused() -> None:
    parameters = Parameters()
    largest = LARGEST
    (row,) = rows(1)
    slots = pack(row, LAYOUT, largest, parameters)
    for other in (slots[:-1], [*slots, slots[-1]]):
        with pytest.raises(FrameError, match=f"in {len(other)} ciphertexts instead of"):
            unpack(other, LAYOUT, largest, parameters, 1)
    # two clients whose highest limbs are within theirs, and whose sum has 65 bits
    alone = Layout((FieldShape("size", 64, ()),))
    (slots,) = pack({"size": np.array((1 << 63) - 1)}, alone, largest, parameters)
    with pytest.raises(FrameError, match="size of a decrypted sum is beyond its range"):
        unpack([2 * slots], alone, largest, parameters, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"degree": 4096, "scale_bits": 20, "moduli": (40, 20, 40)}, "no room for noise"),
        ({"scale_bits": 79}, "no room"),
        ({"degree": 4096, "scale_bits": 40, "moduli": (53, 53)}, "take a scale of 2.80 at degree"),
        ({"degree": 4096, "scale_bits": 40, "moduli": (60, 55)}, "not secure"),
        ({"degree": 4096, "scale_bits": 40, "moduli": (53, 54)}, "degree 4096: it allows 106"),
        ({"moduli": (46, 46, 48)}, "do not hold"),
        ({"degree": 1024}, "not offered"),
        ({"moduli": (54,)}, "two or more"),
    ],
)
def test_parameters_that_are_not_secure_or_not_precise_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Parameters(**options)


@pytest.mark.parametrize(
    "text",
    [
        "", "delta:32:", "delta:32:30x70;size:64:;", "delta:64:3", "other:32:3",
        "delta:32:3;delta:32:3", "delta:32:03", "delta:32:9999999999x9999999999",
        "delta:32:3" + " " * 5000, "delta:32:-3",
    ],
)  # fmt: skip
def test_other_layouts_are_refused(text: str) -> None:
    if text == "delta:32:":  # a single number is a layout
        assert Layout.parse(text, BITS).slots == 1
        return
    with pytest.raises(FrameError, match="describes no fields"):
        Layout.parse(text, BITS)


def test_a_sum_of_more_clients_than_it_can_hold_is_refused() -> None:
    with pytest.raises(UsageError, match=f"1 to {MOST_MEMBERS}"):
        unpack([], LAYOUT, LARGEST, Parameters(), MOST_MEMBERS + 1)


def test_layouts_are_read_as_they_are_written() -> None:
    assert Layout.parse(str(LAYOUT), BITS) == LAYOUT


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(UsageError, match=r"pip install tenseal.*pads"):
        tenseal()


def test_tenseal_is_imported_where_it_is_needed_first() -> None:
    package = Path(ciphers.__file__).parents[2]
    importing = [p for p in package.rglob("*.py") if "import tenseal" in p.read_text()]
    assert importing == [Path(ciphers.__file__)]
    module = ast.parse(importing[0].read_text())
    assert not any("tenseal" in ast.unparse(n) for n in module.body if isinstance(n, ast.Import))


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_ciphertext_that_the_library_cannot_decrypt_is_refused(
    error: type[Exception], cipher: SecretCipher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def decrypt(self) -> Any:
            raise error("encrypted is not valid for encryption parameters")

        def __iadd__(self, noise: Any) -> Broken:
            return self

    monkeypatch.setattr(SecretCipher, "load", lambda self, ciphertext: Broken())
    for decrypt in (cipher.decrypt, lambda data: cipher.flooded(data, CLIENTS)):
        with pytest.raises(FrameError, match="cannot be decrypted: it is refused"):
            decrypt(b"")
