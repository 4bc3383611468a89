"""ChaCha20 streams (RFC 8439) and Gaussians from them, on the device where they are used.

`keystream` and `gaussians` are one operation of torch each. On CUDA each is one kernel, which is
compiled when it is first needed and compared with the operations of `by_operations`. Without a
compiler or with a kernel that differs, of which a warning tells, and on other devices, these
operations take its place: some five hundred of them, on integers and in float64, whose number
depends on no row.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch
from securecluster.errors import SecureClusterWarning
from securecluster.privacy.dp.grid_noise import ERROR, HALF, TAIL

# "expand 32-byte k", the first words of a state (RFC 8439, section 2.3)
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
DOUBLE_ROUNDS = 10
WORDS_IN_BLOCK = 16

# A thread makes one block of a stream, or the Gaussians of one. Tests compile them for the CPU.
THREADS = 128
PAIRS_IN_BLOCK = 4
KERNELS = """
#define ROTATED(x, bits) (((x) << (bits)) | ((x) >> (32 - (bits))))
#define QUARTER_ROUND(a, b, c, d) \\
    a += b; d ^= a; d = ROTATED(d, 16); \\
    c += d; b ^= c; b = ROTATED(b, 12); \\
    a += b; d ^= a; d = ROTATED(d, 8); \\
    c += d; b ^= c; b = ROTATED(b, 7);

__device__ void make_block(
    const unsigned int *key, const unsigned int *nonce, unsigned int counter, unsigned int *x)
{
    unsigned int start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
    for (int i = 0; i < 8; i++) start[4 + i] = key[i];
    start[12] = counter;
    for (int i = 0; i < 3; i++) start[13 + i] = nonce[i];
    for (int i = 0; i < 16; i++) x[i] = start[i];
    for (int round = 0; round < 10; round++) {
        QUARTER_ROUND(x[0], x[4], x[8], x[12])
        QUARTER_ROUND(x[1], x[5], x[9], x[13])
        QUARTER_ROUND(x[2], x[6], x[10], x[14])
        QUARTER_ROUND(x[3], x[7], x[11], x[15])
        QUARTER_ROUND(x[0], x[5], x[10], x[15])
        QUARTER_ROUND(x[1], x[6], x[11], x[12])
        QUARTER_ROUND(x[2], x[7], x[8], x[13])
        QUARTER_ROUND(x[3], x[4], x[9], x[14])
    }
    for (int i = 0; i < 16; i++) x[i] += start[i];
}

extern "C" __global__ void keystream(
    const unsigned int *keys, const unsigned int *nonces, unsigned int *words,
    int blocks, int total)
{
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= total) return;
    const int stream = place / blocks;
    unsigned int x[16];
    make_block(keys + 8LL * stream, nonces + 3LL * stream, place % blocks, x);
    for (int i = 0; i < 16; i++) words[16LL * place + i] = x[i];
}

extern "C" __global__ void gaussians(
    const unsigned int *keys, const unsigned int *nonces, const double *scales,
    double *integers, bool *unsure, long long *words,
    int apart, int between, int half, int blocks, int total, double error, double tail)
{
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= total) return;
    const int stream = place / blocks;
    const int first = place % blocks;
    const double scale = scales[stream];
    unsigned int x[16];
    unsigned int nonce[3];
    for (int i = 0; i < 3; i++) nonce[i] = nonces[(long long)apart * stream + between * i];
    make_block(keys + 8LL * stream, nonce, first, x);
    for (int i = 0; i < 4; i++) {
        const int pair = 4 * first + i;
        if (pair >= half) return;
        const long long radius_word =
            (long long)(((unsigned long long)x[4 * i + 1] << 32) | x[4 * i]);
        const long long angle_word =
            (long long)(((unsigned long long)x[4 * i + 3] << 32) | x[4 * i + 2]);
        const double u = fabs((double)radius_word + 0.5) * 0x1p-63;
        const double radius = sqrt(log(u) * (-2 * scale * scale));
        const double angle = (double)angle_word * (3.141592653589793 * 0x1p-63);
        const bool inaccurate = fabs(u - 0.5) > 0.5 - tail;
        const double exact[2] = {radius * cos(angle), radius * sin(angle)};
        const long long row = 2LL * half * stream + pair;
        for (int sine = 0; sine < 2; sine++) {
            const long long at = row + (long long)sine * half;
            integers[at] = rint(exact[sine]) + 0.0;  // no zero has a sign
            unsure[at] = inaccurate || fabs(exact[sine] - integers[at]) >= 0.5 - scale * error;
            words[at] = sine ? angle_word : radius_word;
        }
    }
}
"""


def words_of(secrets: Sequence[bytes], device: torch.device) -> torch.Tensor:
    """Return secrets of 32 bytes as keys on a device, (k, 8) int32.

    Args:
        secrets: the k secrets.
        device: of the result.
    """
    words = np.frombuffer(bytearray().join(secrets), dtype="<i4").reshape(-1, 8)
    return to_device(words, device)


def keystream(keys: torch.Tensor, nonces: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the first blocks of several ChaCha20 streams, with counters from 0.

    Args:
        keys: keys, (k, 8) int32.
        nonces: nonces, (k, 3) int32.
        blocks: number of blocks of 16 words, below 2^32.

    Returns:
        (k, 16·blocks) int32: the streams' bytes in little-endian order.
    """
    words: torch.Tensor = _operations()[0](keys, nonces, blocks)
    return words


def gaussians(
    keys: torch.Tensor, nonces: torch.Tensor, scales: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pairs of rounded Gaussians of several streams (Box and Muller 1958).

    Pair i takes the words 2i and 2i + 1 of 64 bits: the first for the radius, the second for the
    angle.

    Args:
        keys: keys, (k, 8) int32.
        nonces: nonces, (k, 3) int32.
        scales: standard deviation of each stream's Gaussians, (k,) float64.
        half: pairs from each stream.

    Returns:
        The integers, float64; a mask of those that float64 may have rounded wrongly; and the words
        of radii and angles, int64: (k, 2, half) each.
    """
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    outputs = _operations()[1](keys, nonces, scales, half)
    return outputs


@functools.cache
def _operations() -> tuple[Any, Any]:
    """Return `keystream` and `gaussians` as operations that torch's dispatcher knows."""

    # torch reads annotations, which are strings here: the schemas say the types
    def stream(keys, nonces, blocks):  # type: ignore[no-untyped-def]
        kernels = _kernels(keys.device.index) if keys.is_cuda else None
        if kernels is None:
            return stream_by_operations(keys, nonces, blocks)
        return kernels.keystream(keys, nonces, blocks)

    def noise(keys, nonces, scales, half):  # type: ignore[no-untyped-def]
        kernels = _kernels(keys.device.index) if keys.is_cuda else None
        if kernels is None:
            return by_operations(keys, nonces, scales, half)
        return kernels.gaussians(keys, nonces, scales, half)

    streams = "(Tensor keys, Tensor nonces, int blocks) -> Tensor"
    noises = "(Tensor keys, Tensor nonces, Tensor scales, int half) -> (Tensor, Tensor, Tensor)"
    made = torch.library.custom_op
    return (
        made("securecluster::keystream", stream, mutates_args=(), schema=streams),
        made("securecluster::gaussians", noise, mutates_args=(), schema=noises),
    )


class Kernels:
    """The operations as compiled kernels.

    Args:
        compiled: name -> a function of a grid, a block and arguments that launches the kernel.
    """

    def __init__(self, compiled: Callable[[str], Callable[..., None]]) -> None:
        self._keystream = compiled("keystream")
        self._gaussians = compiled("gaussians")

    def keystream(self, keys: torch.Tensor, nonces: torch.Tensor, blocks: int) -> torch.Tensor:
        """Return `keystream` of the same arguments."""
        words = keys.new_empty(len(keys), WORDS_IN_BLOCK * blocks)
        block_count = len(keys) * blocks
        arguments: list[Any] = [keys.contiguous(), nonces.contiguous(), words, blocks, block_count]
        self._launch(self._keystream, block_count, arguments)
        return words

    def gaussians(
        self, keys: torch.Tensor, nonces: torch.Tensor, scales: torch.Tensor, half: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `gaussians` of the same arguments."""
        shape = (len(keys), 2, half)
        integers = scales.new_empty(shape)
        unsure = torch.empty(shape, dtype=torch.bool, device=keys.device)
        words = torch.empty(shape, dtype=torch.int64, device=keys.device)
        blocks = -(-half // PAIRS_IN_BLOCK)
        block_count = len(keys) * blocks
        arguments: list[Any] = [keys.contiguous(), nonces, scales.contiguous()]
        arguments += [integers, unsure, words]
        arguments += [*nonces.stride(), half, blocks, block_count, ERROR, TAIL]
        self._launch(self._gaussians, block_count, arguments)
        return integers, unsure, words

    def _launch(self, kernel: Callable[..., None], block_count: int, arguments: list[Any]) -> None:
        """Launch a kernel with a thread for each of `block_count` blocks of the streams."""
        if block_count:
            groups = -(-block_count // THREADS)
            kernel((groups, 1, 1), (THREADS, 1, 1), arguments)

    def right(self, device: torch.device) -> bool:
        """Return whether the kernels compute what the operations do.

        Args:
            device: of the kernels.
        """
        keys = words_of([bytes(range(32)), bytes(range(32, 64))], device)
        nonces = torch.tensor([[1, -2, 3], [-4, 5, 6]], dtype=torch.int32, device=device)
        scales = torch.tensor([1e3, 3e5], dtype=torch.float64, device=device)
        stream = self.keystream(keys, nonces, 3)
        integers, unsure, words = self.gaussians(keys, nonces, scales, 1001)
        expected = by_operations(keys.cpu(), nonces.cpu(), scales.cpu(), 1001)
        sure = ~(unsure.cpu() | expected[1])
        return (
            torch.equal(stream.cpu(), stream_by_operations(keys.cpu(), nonces.cpu(), 3))
            and torch.equal(words.cpu(), expected[2])
            and torch.equal(integers.cpu()[sure], expected[0][sure])
            and bool(sure.double().mean() > 0.99)
        )


def compiled(device: torch.device, source: str) -> Callable[[str], Callable[..., None]]:
    """Return a function of a kernel's name that compiles it.

    Args:
        device: a CUDA device.
        source: of the kernels, CUDA C.

    Returns:
        name -> a function of a grid, a block and arguments that launches the kernel.
    """

    def kernel(name: str) -> Callable[..., None]:
        with torch.cuda.device(device), _any_toolkit():
            made = torch.cuda._compile_kernel(source, name)

        def launch(*arguments: Any) -> None:
            with torch.cuda.device(device):
                made(*arguments)

        return launch

    return kernel


@contextmanager
def _any_toolkit() -> Iterator[None]:
    """Let torch compile where there is no CUDA toolkit, but torch's own NVRTC.

    torch asks for the toolkit's headers, of which the kernels include none.
    """
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None:
        cpp_extension.CUDA_HOME = os.path.dirname(__file__)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home


@functools.cache
def _kernels(index: int) -> Kernels | None:
    """Return the compiled kernels of a CUDA device, or None where they are not to be had or wrong.

    Args:
        index: number of the device.
    """
    device = torch.device("cuda", index)
    try:
        kernels = Kernels(compiled(device, KERNELS))
        if kernels.right(device):
            return kernels
        reason = "they differ from torch's operations"
    except Exception as error:  # no NVRTC, an older torch, a driver that takes no such code
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"compiled kernels for noise cannot be used on this GPU ({reason}): torch's operations "
        "take their place, with the same results and more launches a step",
        SecureClusterWarning,
        stacklevel=2,
    )
    return None


def by_operations(
    keys: torch.Tensor, nonces: torch.Tensor, scales: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `gaussians` of the same arguments by torch's operations, on any device."""
    blocks = -(-half // PAIRS_IN_BLOCK)
    stream = stream_by_operations(keys, nonces, blocks).view(torch.int64)
    words = stream.view(len(keys), -1, 2)[:, :half].mT.contiguous()  # (k, 2, half)
    scale = scales[:, None]
    # uniform numbers u in (0, 1), which become the radius in place
    u = words[:, 0].double().add_(0.5).abs_().mul_(2.0**-HALF)
    inaccurate = (u - 0.5).abs_() > 0.5 - TAIL
    radius = u.log_().mul_(-2 * scale.square()).sqrt_()
    angle = words[:, 1].double().mul_(math.pi * 2.0**-63)
    exact = torch.stack([angle.cos(), angle.sin()], 1).mul_(radius[:, None])
    integers = exact.round().add_(0.0)  # no zero has a sign
    unsure = exact.sub_(integers).abs_() >= (0.5 - scale * ERROR)[..., None]
    unsure |= inaccurate[:, None]
    return integers, unsure, words


def stream_by_operations(keys: torch.Tensor, nonces: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return `keystream` of the same arguments by torch's operations, on any device."""
    streams = len(keys)
    shape = (4, streams, blocks)
    constants = torch.tensor(CONSTANTS, dtype=torch.int32, device=keys.device)
    counters = torch.arange(blocks, dtype=torch.int32, device=keys.device)
    rows = [
        constants[:, None, None].expand(shape),
        keys[:, :4].T[..., None].expand(shape),
        keys[:, 4:].T[..., None].expand(shape),
        torch.cat([counters.expand(1, *shape[1:]), nonces.T[..., None].expand(3, *shape[1:])]),
    ]
    a, b, c, d = [row.clone(memory_format=torch.contiguous_format) for row in rows]
    for _ in range(DOUBLE_ROUNDS):
        b, d = _quarter_rounds(a, b, c, d)
        # columns become diagonals
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        b, d = _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    mixed = [row.add_(start) for row, start in zip((a, b, c, d), rows, strict=True)]
    return torch.cat(mixed).permute(1, 2, 0).contiguous().view(streams, -1)


def _quarter_rounds(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make four quarter rounds side by side, and return the new b and d; a and c change in place.

    Args:
        a: first words of the four columns, (4, …) int32; b, c and d are the second to fourth.
    """
    for first, second in ((16, 12), (8, 7)):
        a.add_(b)
        d = _rotated(d.bitwise_xor_(a), first)
        c.add_(d)
        b = _rotated(b.bitwise_xor_(c), second)
    return b, d


def _rotated(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return 32-bit words rotated to the left."""
    upper = words << bits
    # the shift of signed words copies their sign
    lower = (words >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    return upper.bitwise_or_(lower)
