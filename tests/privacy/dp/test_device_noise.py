"""Noise on a device: its cipher against `cryptography`, its integers against mpmath, its tags
against Python's integers; the CUDA kernels are compiled for the CPU and compared with torch's
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import compiled_kernels
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from pretended import PRETENDED, counted, pretending
from scipy import stats
from torch.utils import cpp_extension

from securecluster.errors import SecureClusterWarning
from securecluster.privacy.dp import device_cipher, device_noise
from securecluster.privacy.dp.device_cipher import Kernels, by_operations, gaussians, keystream
from securecluster.privacy.dp.device_noise import Tags, add_noise
from securecluster.privacy.dp.grid_noise import rounded
from securecluster.privacy.dp.noise_streams import NoiseStreams

CPU = torch.device("cpu")
SECRETS = [bytes(range(k, k + 32)) for k in range(3)]
KEYS = device_cipher.words_of(SECRETS, CPU)
NONCES = torch.tensor([[0, 0, 0], [1, -2, 3], [-(2**31), 2**31 - 1, 0]], dtype=torch.int32)


def cipher_bytes(k: int, length: int) -> bytes:
    nonce = NONCES[k].numpy().tobytes()
    stream = Cipher(ChaCha20(SECRETS[k], bytes(4) + nonce), mode=None).encryptor()
    return stream.update(bytes(length))


@pytest.mark.parametrize("blocks", [1, 7])
def test_streams_are_those_of_chacha20(blocks: int) -> None:
    words = keystream(KEYS, NONCES, blocks)
    assert [row.numpy().tobytes() for row in words] == [
        cipher_bytes(k, 64 * blocks) for k in range(3)
    ]


@pytest.mark.parametrize("half", [1, 4, 9])
def test_pairs_take_two_words_each_and_round_as_mpmath(half: int) -> None:
    scales = torch.tensor([3.0, 1e3, 2.0**29], dtype=torch.float64)
    integers, unsure, words = gaussians(KEYS, NONCES, scales, half)
    for k in range(3):
        drawn = np.frombuffer(cipher_bytes(k, 16 * half), dtype="<i8").reshape(half, 2)
        assert words[k].T.tolist() == drawn.tolist()
        for pair, (radius, angle) in enumerate(drawn.tolist()):
            for sine in (0, 1):
                exact = rounded(radius, angle, float(scales[k]), bool(sine), bytes(32))
                assert unsure[k, sine, pair] or integers[k, sine, pair] == exact


def test_what_float64_may_round_wrongly_is_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = torch.full((3,), 50.0, dtype=torch.float64)
    monkeypatch.setattr(device_cipher, "ERROR", 2.0**-9)
    monkeypatch.setattr(device_cipher, "TAIL", 2.0**-4)
    _, unsure, words = by_operations(KEYS, NONCES, scales, 500)
    u = np.abs(words[:, 0].numpy().astype(np.longdouble) + 0.5) * np.longdouble(2) ** -63
    angle = words[:, 1].numpy().astype(np.longdouble) * np.longdouble(np.pi) / 2**63
    radius = 50 * np.sqrt(-2 * np.log(u))
    exact = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    tails = (u < 2.0**-4) | (u > 1 - 2.0**-4)
    near = np.abs(exact - np.rint(exact)) >= 0.5 - 50 * 2.0**-9
    expected = near | tails[:, None]
    assert 0.1 < expected.mean() < 0.5
    assert unsure.numpy().tolist() == expected.tolist()


def test_draws_that_are_unsure_are_settled_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cipher, "TAIL", 0.5)  # all of them
    calls = []

    def seen(*arguments: Any) -> float:
        calls.append(arguments)
        return rounded(*arguments)

    monkeypatch.setattr(device_noise, "rounded", seen)
    settled = torch.zeros(3, 7)
    add_noise(settled, SECRETS, [0.25] * 3, [100.0] * 3)
    assert len(calls) == 3 * 8
    assert len({key for *_, key in calls}) == 3 * 4  # further bits of each pair of draws
    monkeypatch.undo()
    plain = torch.zeros(3, 7)
    add_noise(plain, SECRETS, [0.25] * 3, [100.0] * 3)
    assert torch.equal(plain, settled)
    assert plain.unique().numel() > 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tags_are_multilinear_hashes(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5, dtype=dtype)
    found = Tags(SECRETS, rows).of(rows[1:], 1)
    count = rows.element_size() // 4 * 5
    for k in (1, 2):
        cipher = Cipher(ChaCha20(SECRETS[k], bytes(16)), mode=None).encryptor()
        stream = np.frombuffer(cipher.update(bytes(8 * 3 * count)), dtype="<u8")
        keys = [int(word) for word in stream]
        words = [int(word) for word in np.frombuffer(rows[k].numpy().tobytes(), dtype="<i4")]
        for number in range(3):
            own = keys[number * count : (number + 1) * count]
            value = sum(key * word for key, word in zip(own, words, strict=True))
            assert int(found[k - 1, number]) % 2**32 == value % 2**64 >> 32


def test_rows_that_differ_get_other_noise_and_a_row_is_a_batch_of_one() -> None:
    rows = torch.zeros(3, 40, dtype=torch.float64)
    tags = Tags(SECRETS, rows)

    def noised(rows: torch.Tensor, tags: Tags | None, first: int = 0) -> torch.Tensor:
        noisy = rows.clone()
        count = len(rows)
        secrets = SECRETS[first : first + count]
        add_noise(noisy, secrets, [2.0**-10] * count, [1.0] * count, tags)
        return noisy - rows

    once = noised(rows, tags)
    assert torch.equal(once, noised(rows, tags))
    assert len(set(map(tuple, once.tolist()))) == 3
    other = rows.clone()
    other[1, 39] = 2.0**-10  # one step of the grid
    found = noised(other, tags)
    assert torch.equal(found[0], once[0]) and torch.equal(found[2], once[2])
    assert (found[1] != once[1]).sum() > 35
    for k in range(3):
        alone = Tags(SECRETS[k : k + 1], rows[:1])
        assert torch.equal(noised(rows[k : k + 1], alone, k)[0], once[k])


def test_noise_is_gaussian_and_lies_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_noise, "BLOCK", 30_000)  # two rows at a time
    rows = torch.linspace(-1, 1, 45_003, dtype=torch.float64).reshape(3, -1)
    noisy = rows.clone()
    grid, sigma = [2.0**-8, 2.0**-9, 2.0**-10], [0.7, 1.0, 2.0]
    add_noise(noisy, SECRETS, grid, sigma)
    for row, noise, g, s in zip(rows, noisy, grid, sigma, strict=True):
        assert torch.equal((noise / g).round() * g, noise)
        draws = ((noise - (row / g).round() * g) / s).numpy()
        assert stats.kstest(draws, "norm").pvalue > 1e-3
        half = len(draws) // 2
        assert abs(np.corrcoef(draws[:half], draws[-half:])[0, 1]) < 0.03


@pytest.mark.parametrize("bounds_rows", [False, True])
def test_rows_of_clients_are_those_of_a_client_alone_up_to_the_noise(bounds_rows: bool) -> None:
    rows = torch.randn(3, 30, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [9.0]])
    streams = NoiseStreams(lambda client: SECRETS[client], "run", bounds_rows)
    together = rows.clone()
    with streams.logged() as log:
        streams.noise_together([2, 0, 1], "row", 5, together, 1e-4, 1.5)
    assert log == [(2, 1e-4), (0, 1e-4), (1, 1e-4)]
    for client, row, noisy in zip([2, 0, 1], rows, together, strict=True):
        alone = streams.noised(client, "row", 5, row, 1e-4, 1.5)
        torch.testing.assert_close(noisy, alone, rtol=0, atol=2e-3)
        assert not torch.equal(noisy, row)
        batch_of_one = row[None].clone()
        streams.noise_together([client], "row", 5, batch_of_one, 1e-4, 1.5)
        assert torch.equal(batch_of_one[0], noisy)
    lengths = torch.linalg.vector_norm(together, dim=1)
    assert bool((lengths > 2).any()) != bounds_rows
    empty = torch.zeros(2, 0)
    streams.noise_together([0, 1], "row", 5, empty, 1e-4, 1.5)


def test_a_number_too_large_for_its_noise_is_cut_as_for_a_client_alone() -> None:
    streams = NoiseStreams(lambda client: SECRETS[client], "run")
    rows = torch.tensor([[1e30, -1e30, 0.0, 1.0]])
    together = rows.clone()
    streams.noise_together([0], "row", 1, together, 0.5, 1.0)
    alone = streams.noised(0, "row", 1, rows[0], 0.5, 1.0)
    torch.testing.assert_close(together[0, :2], alone[:2], rtol=1e-2, atol=0)
    assert float(together.abs().max()) < 1e6


def test_another_request_gets_other_noise() -> None:
    rows = torch.zeros(2, 8, dtype=torch.float64)
    streams = NoiseStreams(lambda client: SECRETS[client], "run")
    seen = set()
    for purpose, step, multiplier, value in (
        ("row", 1, 1.0, 0.0),
        ("other", 1, 1.0, 0.0),
        ("row", 2, 1.0, 0.0),
        ("row", 1, 1.5, 0.0),
        ("row", 1, 1.0, 1.0),
    ):
        noisy = rows + value
        streams.noise_together([0, 1], purpose, step, noisy, multiplier, 1.0)
        seen |= {tuple(row) for row in ((noisy - value) / multiplier).tolist()}
    assert len(seen) == 10


def test_the_operations_run_where_the_keys_are() -> None:
    scales = torch.tensor([3.0, 1e3, 1e5], dtype=torch.float64)
    here = by_operations(KEYS, NONCES, scales, 9)
    with pretending(), counted() as costs:
        there = by_operations(KEYS.to(PRETENDED), NONCES.to(PRETENDED), scales.to(PRETENDED), 9)
        found = gaussians(KEYS.to(PRETENDED), NONCES.to(PRETENDED), scales.to(PRETENDED), 9)
    for one, other, third in zip(here, there, found, strict=True):
        assert torch.equal(one, other.cpu()) and torch.equal(one, third.cpu())
    assert 500 < sum(costs.launches.values()) < 700  # without kernels, whatever the rows
    assert not costs.waits


LAUNCHERS = """
extern "C" void launch_keystream(int grid, int block, const unsigned int *a, const unsigned int *b,
    unsigned int *c, int d, int e) { LAUNCH(keystream(a, b, c, d, e)) }
extern "C" void launch_gaussians(int grid, int block, const unsigned int *a, const unsigned int *b,
    const double *c, double *d, bool *e, long long *f, int g, int h, int i, int j, int k, double l,
    double m) { LAUNCH(gaussians(a, b, c, d, e, f, g, h, i, j, k, l, m)) }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The CUDA kernels as a library for the CPU."""
    folder = tmp_path_factory.mktemp("kernels")
    return compiled_kernels.compiled(folder, device_cipher.KERNELS, LAUNCHERS)


def test_kernels_compute_what_the_operations_do(compiled: Callable[[str], Any]) -> None:
    kernels = Kernels(compiled)
    assert kernels.right(CPU)
    upper_halves = torch.zeros(3, 6, dtype=torch.int32)
    upper_halves[:, 1::2] = NONCES
    words = kernels.keystream(KEYS, NONCES, 5)
    assert [row.numpy().tobytes() for row in words] == [cipher_bytes(k, 320) for k in range(3)]
    scales = torch.tensor([3.0, 1e3, 2.0**29], dtype=torch.float64)
    found = kernels.gaussians(KEYS, upper_halves[:, 1::2], scales, 1237)
    expected = by_operations(KEYS, NONCES, scales, 1237)
    assert torch.equal(found[2], expected[2])
    sure = ~(found[1] | expected[1])
    assert sure.double().mean() > 0.995
    assert torch.equal(found[0][sure], expected[0][sure])
    for integers in (found[0], expected[0]):
        zeros = integers[integers == 0]
        assert len(zeros) > 200 and not zeros.signbit().any()  # which would tell that a row's has


@pytest.mark.parametrize("changed", ["keystream", "gaussians"])
def test_wrong_kernels_are_not_used(compiled: Callable[[str], Any], changed: str) -> None:
    def other(name: str) -> Callable[..., None]:
        launch = compiled(name)

        def wrong(grid: Any, block: Any, arguments: list[Any]) -> None:
            launch(grid, block, arguments)
            if name == changed:
                arguments[2 if name == "keystream" else 3].view(-1)[3] += 1

        return wrong

    assert not Kernels(other).right(CPU)


def test_kernels_that_cannot_be_used_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device, source: str) -> Callable[[str], Callable[..., None]]:
        raise RuntimeError("no compiler here")

    find = device_cipher._kernels.__wrapped__
    monkeypatch.setattr(device_cipher, "compiled", missing)
    with pytest.warns(SecureClusterWarning, match=r"for noise .*RuntimeError: no compiler here"):
        assert find(0) is None
    monkeypatch.setattr(device_cipher, "compiled", lambda device, source: lambda name: None)
    for same in (True, False):
        monkeypatch.setattr(Kernels, "right", lambda kernels, device, same=same: same)
        if same:
            assert isinstance(find(0), Kernels)
            continue
        with pytest.warns(SecureClusterWarning, match="they differ from torch's operations"):
            assert find(0) is None


@pytest.mark.parametrize("home", [None, "/a/toolkit"])
def test_kernels_compile_without_a_toolkit(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub in the place of NVRTC, behind torch's own search for headers."""
    asked = []

    def stub(source: str, name: str) -> Callable[..., None]:
        asked.append((name, cpp_extension.include_paths("cuda")))
        return lambda *arguments: None

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", stub)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    device_cipher.compiled(torch.device("cuda", 0), device_cipher.KERNELS)("keystream")
    ((name, folders),) = asked
    assert name == "keystream" and all(Path(folder).name for folder in folders)
    assert "#include" not in device_cipher.KERNELS
    assert home == cpp_extension.CUDA_HOME
