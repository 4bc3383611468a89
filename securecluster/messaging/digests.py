"""Short digests of replies, which identify a release that is made again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Picks, Rows, Shared

SIZE = 8  # bytes
# BLAKE2b's personalization, 16 bytes: digests of other uses never equal those of replies
PERSON = b"securecluster re"
TENSORS = (Picks, Rows, Shared)


def reply_digests(reply: Any, count: int) -> tuple[str, ...]:
    """Return 16 hexadecimal digits (BLAKE2b) for each frame of a batch of replies.

    Args:
        reply: a message; all its fields are digested, with their names, types and shapes.
        count: number of frames in the batch.
    """
    hashers = [hashlib.blake2b(digest_size=SIZE, person=PERSON) for _ in range(count)]
    for name, value in vars(reply).items():
        label = f"{name} ".encode()
        contents = _frame_contents(value, count)
        for hasher, content in zip(hashers, contents, strict=True):
            hasher.update(label)
            hasher.update(content)
    return tuple(hasher.hexdigest() for hasher in hashers)


def tells_noise(reply: Any) -> bool:
    """Return True if two draws of noise give two different replies.

    Choices do not: there are few of them, so different noise can lead to the same one.

    Args:
        reply: a message.
    """
    tensors = [value for value in vars(reply).values() if isinstance(value, TENSORS)]
    dtypes = {_table(value).dtype for value in tensors}
    return not dtypes.isdisjoint(_numeric_dtypes())


def _numeric_dtypes() -> tuple[torch.dtype, ...]:
    """Return the types of codes and real numbers; choices are int64."""
    # no constant of the module, since torch is imported on first use
    return (torch.uint8, torch.float32, torch.float64)


def _table(value: Picks | Rows | Shared) -> torch.Tensor:
    if isinstance(value, Shared):
        return value.value
    return value.table


def _frame_contents(value: Any, count: int) -> Iterator[bytes]:
    """Yield the contents of a field in each frame.

    Args:
        value: the field of a batch.
        count: number of frames in the batch.
    """
    if isinstance(value, Rows):
        table = _row_bytes(value.table)
        rows = value.index
        if rows is None:
            rows = tuple(range(count))
        for row in rows:
            yield table[row]
    elif isinstance(value, Picks):
        table = _row_bytes(value.table)
        for picks in value.picks:
            length = b"%d " % len(picks)
            contents = [table[row] for row in picks]
            yield length + b"".join(contents)
    else:
        content = repr(value).encode()
        if isinstance(value, Shared):
            (content,) = _row_bytes(value.value[None])
        for _ in range(count):
            yield content


def _row_bytes(table: torch.Tensor) -> list[bytes]:
    """Return the type, shape and numbers of each row of a tensor."""
    shape = tuple(table.shape[1:])
    prefix = f"{table.dtype} {shape} ".encode()
    in_memory = table.detach().cpu()
    flat = in_memory.reshape(len(table), math.prod(shape)).contiguous()
    octets = flat.view(torch.uint8).numpy()
    return [prefix + row.tobytes() for row in octets]
