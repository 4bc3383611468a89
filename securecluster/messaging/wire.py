"""The one codec: messages and state to bytes and back, in the safetensors format. No pickle
anywhere.

A frame is a safetensors file: its tensors are the tensor fields of the message, its metadata one
    JSON string with the header and the
scalar fields. `size` gives `len(encode(...))` from shapes alone, so that an in-process run can
count bytes without encoding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Header, Picks, Rows, Shared, kinds, optional

A = TypeVar("A")
# of messages and of what is signed and sealed; the configuration names it, so sides of two versions
# do not talk
VERSION = 2
MAX_FRAME = 1 << 32  # bytes; a longer frame is refused before it is parsed


def _dtypes() -> dict[torch.dtype, tuple[str, int]]:
    """torch dtype -> (safetensors name, alignment rank: the format stores wider types first)."""
    return {
        torch.float64: ("F64", 12),
        torch.float32: ("F32", 10),
        torch.int64: ("I64", 13),
        torch.int32: ("I32", 8),
        torch.uint8: ("U8", 1),
        torch.bool: ("BOOL", 0),
    }


def _split(message: Any, position: int) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """The scalars of a frame, and its tensors as name -> (table, row or rows or None for the
    whole).
    """
    scalars: dict[str, Any] = {}
    tensors: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(message).items():
        if isinstance(value, Shared):
            tensors[name] = (value.value, None)
        elif isinstance(value, Rows):
            tensors[name] = (
                value.table,
                position if value.index is None else value.index[position],
            )
        elif isinstance(value, Picks):
            tensors[name] = (value.table, list(value.picks[position]))
        elif value is not None:
            scalars[name] = value
    return scalars, tensors


def _metadata(header: Header, scalars: dict[str, Any]) -> str:
    return json.dumps(
        [list(vars(header).values()), scalars], separators=(",", ":"), ensure_ascii=True
    )


def encode(header: Header, message: Any, position: int = 0) -> bytes:
    """The frame of one recipient (or sender): frame number `position` of a batch message."""
    from safetensors.torch import save

    scalars, tensors = _split(message, position)
    cut = {name: table if row is None else table[row] for name, (table, row) in tensors.items()}
    return bytes(
        save(
            {k: t.detach().cpu().contiguous().clone() for k, t in cut.items()},
            {"frame": _metadata(header, scalars)},
        )
    )


def size(header: Header, message: Any, position: int = 0) -> int:
    """`len(encode(header, message, position))`, in bytes, without encoding."""
    return sizes([header], message, [position])[0]


def sizes(headers: Iterable[Header], message: Any, positions: Iterable[int]) -> list[int]:
    """`size` of several frames of one batch message."""
    picked = [value.picks for value in vars(message).values() if isinstance(value, Picks)]
    # frames with as many rows have tensors of one shape
    known: dict[tuple[int, ...], tuple[dict[str, Any], int, int]] = {}
    found = []
    for header, position in zip(headers, positions, strict=True):
        rows = tuple(len(picks[position]) for picks in picked)
        if rows not in known:
            scalars, tensors = _split(message, position)
            shapes = {
                name: (_shape(table, row), table.dtype) for name, (table, row) in tensors.items()
            }
            known[rows] = (scalars, *_tensor_table(tuple(sorted(shapes.items()))))
        scalars, table, data = known[rows]
        found.append(_file_size(_metadata(header, scalars), table, data))
    return found


def _shape(table: torch.Tensor, row: Any) -> tuple[int, ...]:
    if row is None:
        return tuple(table.shape)
    return tuple(table.shape[1:]) if isinstance(row, int) else (len(row), *table.shape[1:])


def _file_size(metadata: str, table: int, data: int) -> int:
    header = (
        len('{"__metadata__":{"frame":}}')
        + len(json.dumps(metadata, ensure_ascii=False).encode())
        + table
    )
    return 8 + -(-header // 8) * 8 + data


@cache
def _tensor_table(
    shapes: tuple[tuple[str, tuple[tuple[int, ...], torch.dtype]], ...],
) -> tuple[int, int]:
    """Bytes of the tensors' entries in the safetensors header, and of their data."""
    known = _dtypes()
    text, start = 0, 0
    for name, (shape, dtype) in sorted(shapes, key=lambda s: (-known[s[1][1]][1], s[0])):
        end = start + torch.Size(shape).numel() * dtype.itemsize
        entry = {"dtype": known[dtype][0], "shape": list(shape), "data_offsets": [start, end]}
        # braces out, comma in
        text += (
            len(json.dumps({name: entry}, separators=(",", ":"), ensure_ascii=False).encode()) - 1
        )
        start = end
    return text, start


def _read(data: bytes) -> tuple[str, dict[str, torch.Tensor]]:
    """The metadata string and the tensors of a frame."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if len(data) < 8 or len(data) > MAX_FRAME:
        raise FrameError(
            f"a frame of {len(data)} bytes is refused: ask the sender for a frame between 8 bytes "
            f"and {MAX_FRAME >> 30} GiB"
        )
    length = int.from_bytes(data[:8], "little")
    try:
        if length > len(data) - 8:
            raise ValueError("its header is longer than the frame")
        text = json.loads(data[8 : 8 + length])["__metadata__"]["frame"]
        if not isinstance(text, str):
            raise ValueError("its metadata is not a string")
        tensors = load(data)
        if any(t.dtype not in _dtypes() for t in tensors.values()):
            raise ValueError("a tensor has a type that no message has")
        return text, tensors
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FrameError(
            f"a frame does not parse ({reason}): it was damaged or forged, ask for it again"
        ) from None


def peek(data: bytes) -> Header:
    """The header of a frame."""
    return _header(_read(data)[0])[0]


def _header(text: str) -> tuple[Header, Any]:
    """The header in a frame's metadata, and its scalars."""
    try:
        values, scalars = json.loads(text)
        fields = dataclasses.fields(Header)
        if len(values) != len(fields) or any(
            type(v).__name__ != f.type for v, f in zip(values, fields, strict=True)
        ):
            raise ValueError("its fields are not those of a header")
        if any(type(v) is int and not 0 <= v < 1 << 63 for v in values):
            raise ValueError("a count is out of range")
        return Header(*values), scalars
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(
            f"a frame's header does not parse ({error}): it was damaged or forged, ask for it again"
        ) from None


def decode(data: bytes, message: type[A]) -> tuple[Header, A]:
    """The header and the message (a batch of one) of a frame.

    Raises:
        FrameError: the frame does not parse, or has fields that `message` has not, lacks some, or
            types them otherwise.
    """
    text, tensors = _read(data)
    header, scalars = _header(text)
    if not isinstance(scalars, dict) or set(scalars) & set(tensors):
        raise FrameError(
            f"a {message.__name__} frame does not parse: it was damaged or forged, ask for it again"
        )
    fields: dict[str, Any] = {}
    for name, kind in kinds(cast(Hashable, message)).items():
        value = (
            tensors.pop(name, None) if kind in (Shared, Rows, Picks) else scalars.pop(name, None)
        )
        if value is None and not optional(message, name):
            raise FrameError(
                f"a {message.__name__} frame lacks the field {name!r}: both sides must run the "
                "same version"
            )
        fields[name] = _wrap(message, name, kind, value)
    extra = sorted([*scalars, *tensors])
    if extra:
        raise FrameError(
            f"a {message.__name__} frame has unknown fields {extra}: both sides must run the same "
            "version"
        )
    return header, message(**fields)


def _wrap(message: type, name: str, kind: type, value: Any) -> Any:
    if value is None:
        return None
    if kind is Shared:
        return Shared(value)
    if kind is Rows:
        return Rows(value[None])
    if kind is Picks:
        if value.ndim == 0:
            raise FrameError(f"{message.__name__}.{name}: rows were expected, a single number came")
        return Picks(value, (tuple(range(len(value))),))
    if type(value) is not kind:
        raise FrameError(
            f"{message.__name__}.{name}: {kind.__name__} was expected, {type(value).__name__} came"
        )
    return value
