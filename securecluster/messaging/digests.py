"""Short digests of replies, by which a repeated release is known."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Picks, Rows, Shared

SIZE = 8  # bytes
TENSORS = (Picks, Rows, Shared)


def reply_digests(reply: Any, count: int) -> tuple[str, ...]:
    """Return 16 hex digits (BLAKE2b) for each frame of a batch of replies.

    Args:
        reply: a message; all its fields are digested, with their names, types and shapes.
        count: how many frames it stands for.
    """
    hashers = [hashlib.blake2b(digest_size=SIZE, person=b"securecluster re") for _ in range(count)]
    for name, value in vars(reply).items():
        for hasher, part in zip(hashers, _parts(value, count), strict=True):
            hasher.update(f"{name} ".encode())
            hasher.update(part)
    return tuple(hasher.hexdigest() for hasher in hashers)


def tells_noise(reply: Any) -> bool:
    """Return whether two draws of noise give two replies: not so of choices, which are few whatever
    the noise was.
    """
    kinds = (torch.uint8, torch.float32, torch.float64)  # codes and numbers
    tables = [
        value.value if isinstance(value, Shared) else value.table
        for value in vars(reply).values()
        if isinstance(value, TENSORS)
    ]
    return any(table.dtype in kinds for table in tables)


def _parts(value: Any, count: int) -> Iterator[bytes]:
    """Yield what each frame carries of a field."""
    if isinstance(value, Rows):
        table = _rows(value.table)
        places = range(count) if value.index is None else value.index
        yield from (table[k] for k in places)
    elif isinstance(value, Picks):
        table = _rows(value.table)
        for picks in value.picks:
            yield b"%d " % len(picks) + b"".join(table[k] for k in picks)
    else:
        whole = _rows(value.value[None])[0] if isinstance(value, Shared) else repr(value).encode()
        yield from (whole for _ in range(count))


def _rows(table: torch.Tensor) -> list[bytes]:
    """Return the type, shape and numbers of each row of a tensor."""
    shape = tuple(table.shape[1:])
    head = f"{table.dtype} {shape} ".encode()
    flat = table.detach().cpu().reshape(len(table), math.prod(shape)).contiguous()
    octets = flat.view(torch.uint8).numpy()
    return [head + row.tobytes() for row in octets]
