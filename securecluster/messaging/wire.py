"""Codec of frames: messages to bytes and back, in the safetensors format, without pickle.

A frame is a safetensors file: its tensors are the tensor fields of the message, and its metadata
are one JSON string with the header and the scalar fields. `size` returns `len(encode(...))` from
shapes alone, so that an in-process run counts bytes without encoding.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Header, Picks, Rows, Shared, kinds, optional
from securecluster.messaging.receipts import Receipts, receipts_as_json, receipts_from_json
from securecluster.messaging.refusals import SENTENCES, refused

A = TypeVar("A")
Scalars = dict[str, Any]
Tensors = dict[str, "torch.Tensor"]
# table of each tensor, and the row or rows of a frame; None stands for the complete table
Selections = dict[str, tuple[Any, Any]]
Shape = tuple[int, ...]
TensorForm = tuple[Shape, "torch.dtype"]
Layout = tuple[Scalars, int, int]  # scalars, bytes of the tensors' entries, bytes of their data
# Version of messages, and of what is signed and sealed. It is part of the configuration, so sides
# of two versions refuse each other's frames.
VERSION = 5
REFUSED = "!refused"  # scalar of a refusal; no field of a message can have this name
MAX_FRAME = 1 << 32  # bytes; a longer frame is refused before it is parsed
MAX_HEADER = 1 << 24  # bytes of its header: the members of a cohort of a million clients

# A safetensors file is the length of its header (8 bytes), the header (JSON, padded with spaces to
# a multiple of 8 bytes) and the tensors' data.
LENGTH_BYTES = 8
ALIGNMENT = 8
COMPACT = (",", ":")  # separators of JSON as safetensors writes it
# Last fields of a header that most frames are without: those of secure sums, and the deadline.
SECURE_DEFAULTS = ["", 0]
NO_DEADLINE = 0
SECURE_FIELDS = len(dataclasses.fields(Header)) - 1
PLAIN_FIELDS = SECURE_FIELDS - len(SECURE_DEFAULTS)


def _dtypes() -> dict[torch.dtype, tuple[str, int]]:
    """Return the safetensors name and alignment rank of each type that messages have.

    The format stores types of a higher rank first.
    """
    return {
        torch.float64: ("F64", 12),
        torch.float32: ("F32", 10),
        torch.int64: ("I64", 13),
        torch.int32: ("I32", 8),
        torch.uint8: ("U8", 1),
        torch.bool: ("BOOL", 0),
    }


def _split(message: Any, position: int) -> tuple[Scalars, Selections]:
    """Return the scalars and the tensors of a frame, by name.

    Args:
        message: a batch of frames.
        position: number of the frame in the batch.
    """
    scalars: Scalars = {}
    tensors: Selections = {}
    for name, value in vars(message).items():
        if isinstance(value, Shared):
            tensors[name] = (value.value, None)
        elif isinstance(value, Rows):
            row = position
            if value.index is not None:
                row = value.index[position]
            tensors[name] = (value.table, row)
        elif isinstance(value, Picks):
            rows = list(value.picks[position])
            tensors[name] = (value.table, rows)
        elif value is not None:  # an optional field without a value is absent from the frame
            scalars[name] = value
    return scalars, tensors


def header_fields(header: Header) -> list[Any]:
    """Return the fields of a header as a frame has them: without those at the end that say nothing.

    Args:
        header: header of the frame.
    """
    fields = list(vars(header).values())
    if fields[SECURE_FIELDS] != NO_DEADLINE:
        return fields
    fields = fields[:SECURE_FIELDS]
    if fields[PLAIN_FIELDS:] == SECURE_DEFAULTS:
        return fields[:PLAIN_FIELDS]
    return fields


def _metadata(header: Header, scalars: dict[str, Any], receipts: Receipts = ()) -> str:
    """Return the metadata string of a frame."""
    content: list[Any] = [header_fields(header), scalars]
    if receipts:
        content.append(receipts_as_json(receipts))
    return json.dumps(content, separators=COMPACT, ensure_ascii=True)


def encode(header: Header, message: Any, position: int = 0, receipts: Receipts = ()) -> bytes:
    """Return the frame of one recipient (or sender) of a batch message.

    Args:
        header: header of the frame.
        message: a batch of frames.
        position: number of the frame in the batch.
        receipts: what a client released in its reply.
    """
    from safetensors.torch import save

    scalars, tensors = _split(message, position)
    contents = {}
    for name, (table, row) in tensors.items():
        tensor = table
        if row is not None:
            tensor = table[row]
        tensor = tensor.detach().cpu()
        # safetensors refuses tensors that share memory, as rows of one table do
        contents[name] = tensor.contiguous().clone()
    return bytes(save(contents, {"frame": _metadata(header, scalars, receipts)}))


def encode_refusal(header: Header, code: str) -> bytes:
    """Return the frame of a refusal, which `decode` raises at its recipient.

    Args:
        header: header of the frame.
        code: of `refusals.SENTENCES`: nothing else of the reason crosses the wire.
    """
    from safetensors.torch import save

    return bytes(save({}, {"frame": _metadata(header, {REFUSED: code})}))


def size(header: Header, message: Any, position: int = 0, receipts: Receipts = ()) -> int:
    """Return `len(encode(header, message, position, receipts))`, in bytes, without encoding.

    Args:
        header: header of the frame.
        message: a batch of frames.
        position: number of the frame in the batch.
        receipts: what a client released in its reply.
    """
    return sizes(lambda k: header, [()], message, [position], [receipts])[0]


def sizes(
    header: Callable[[int], Header],
    forms: Iterable[Hashable],
    message: Any,
    positions: Iterable[int],
    receipts: Iterable[Receipts] = itertools.repeat(()),
) -> list[int]:
    """Return the lengths of several frames of one batch message, in bytes.

    Frames whose header, receipts and tensors are as long as those of another are as long as it:
    only one of them is measured.

    Args:
        header: returns the header of a frame by its number among these.
        forms: of each frame's header (`Call.forms`): headers of equal forms are equally long.
        message: a batch of frames.
        positions: number of each frame in the batch.
        receipts: of each frame; none by default.
    """
    fields = vars(message).values()
    all_picks = [value.picks for value in fields if isinstance(value, Picks)]
    # frames with the same numbers of picked rows have tensors of the same shapes
    length_of: dict[Hashable, int] = {}
    lengths = []
    frames = zip(forms, positions, strict=True)
    for k, ((form, position), written) in enumerate(zip(frames, receipts, strict=False)):
        row_counts = tuple([len(picks[position]) for picks in all_picks])
        layout_key = (form, written, row_counts)
        if layout_key not in length_of:
            scalars, entry_bytes, data_bytes = _layout(message, position)
            metadata = _metadata(header(k), scalars, written)
            length_of[layout_key] = _file_size(metadata, entry_bytes, data_bytes)
        lengths.append(length_of[layout_key])
    return lengths


def _layout(message: Any, position: int) -> Layout:
    """Return a frame's scalars, and the bytes of its tensors' entries and of their data."""
    scalars, tensors = _split(message, position)
    shapes = {}
    for name, (table, row) in tensors.items():
        shapes[name] = (_shape(table, row), table.dtype)
    cache_key = tuple(sorted(shapes.items()))
    entry_bytes, data_bytes = _tensor_table(cache_key)
    return scalars, entry_bytes, data_bytes


def _shape(table: torch.Tensor, row: Any) -> Shape:
    """Return the shape of a table, of one of its rows, or of several."""
    if row is None:
        return tuple(table.shape)
    if isinstance(row, int):
        return tuple(table.shape[1:])
    return (len(row), *table.shape[1:])


def _file_size(metadata: str, entry_bytes: int, data_bytes: int) -> int:
    """Return the length of a safetensors file.

    Args:
        metadata: the metadata string.
        entry_bytes: length of the tensors' entries in the header.
        data_bytes: length of the tensors' data.
    """
    envelope = len('{"__metadata__":{"frame":}}')
    # a JSON string inside of JSON: its quotes and backslashes are escaped once more
    quoted = json.dumps(metadata, ensure_ascii=False)
    metadata_bytes = len(quoted.encode())
    header_bytes = envelope + metadata_bytes + entry_bytes
    padded_bytes = -(-header_bytes // ALIGNMENT) * ALIGNMENT
    return LENGTH_BYTES + padded_bytes + data_bytes


@cache
def _tensor_table(shapes: tuple[tuple[str, TensorForm], ...]) -> tuple[int, int]:
    """Return the bytes of the tensors' entries in the safetensors header, and of their data.

    Args:
        shapes: (name, (shape, type)) of each tensor.
    """
    dtypes = _dtypes()

    def storage_order(named_form: tuple[str, TensorForm]) -> tuple[int, str]:
        name, (_, dtype) = named_form
        _, rank = dtypes[dtype]
        return -rank, name

    entry_bytes = 0
    start = 0  # of a tensor's data, from the end of the header
    for name, (shape, dtype) in sorted(shapes, key=storage_order):
        dtype_name, _ = dtypes[dtype]
        numbers = math.prod(shape)
        end = start + numbers * dtype.itemsize
        entry = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps({name: entry}, separators=COMPACT, ensure_ascii=False)
        # without the braces around it, and with the comma before it
        entry_bytes += len(text.encode()) - 1
        start = end
    return entry_bytes, start


def _read(data: bytes) -> tuple[str, Tensors]:
    """Return the metadata string and the tensors of a frame.

    Raises:
        FrameError: the frame is too short or too long, or does not parse.
    """
    from safetensors import SafetensorError

    if len(data) < LENGTH_BYTES or len(data) > MAX_FRAME:
        raise FrameError(
            f"a frame of {len(data)} bytes is refused: ask the sender for a frame between 8 bytes "
            f"and {MAX_FRAME >> 30} GiB"
        )
    try:
        return _parsed(data)
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = type(error).__name__
        if str(error):
            reason = str(error).splitlines()[0]
        raise FrameError(
            f"a frame does not parse ({reason}): it was damaged or forged, ask for it again"
        ) from None


def _text(data: bytes) -> str:
    """Return the metadata string of a frame, or raise any of several errors."""
    header_bytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    header_end = LENGTH_BYTES + header_bytes
    if header_end > len(data):
        raise ValueError("its header is longer than the frame")
    if header_bytes > MAX_HEADER:
        raise ValueError("its header is longer than that of any message")
    # `load` returns the tensors without the metadata
    text = json.loads(data[LENGTH_BYTES:header_end])["__metadata__"]["frame"]
    if not isinstance(text, str):
        raise ValueError("its metadata is not a string")
    return text


def _parsed(data: bytes) -> tuple[str, Tensors]:
    """Return the metadata string and the tensors of a frame, or raise any of several errors."""
    from safetensors.torch import load

    text = _text(data)
    tensors = load(data)
    dtypes = _dtypes()
    if any(tensor.dtype not in dtypes for tensor in tensors.values()):
        raise ValueError("a tensor has a type that no message has")
    return text, tensors


def peek(data: bytes) -> Header:
    """Return the header of a frame.

    Args:
        data: the frame.

    Raises:
        FrameError: the frame does not parse.
    """
    text, _ = _read(data)
    header, _, _ = _header(text)
    return header


def outcome(data: bytes) -> tuple[Header, str | None]:
    """Return the header of a reply's frame, and the code by which it refuses, or None.

    Args:
        data: the frame, which its sender made itself.
    """
    header, scalars, _ = _header(_text(data))
    refuses = isinstance(scalars, dict) and list(scalars) == [REFUSED]
    return header, scalars[REFUSED] if refuses else None


def _header(text: str) -> tuple[Header, Any, Receipts]:
    """Return the header in a frame's metadata string, its scalars and its receipts.

    Raises:
        FrameError: the string does not parse, or its values are not those of a header.
    """
    try:
        values, scalars, *receipt_values = json.loads(text)
        _check_header(values)
        if len(receipt_values) > 1:
            raise ValueError("it has more than receipts")
        receipts = receipts_from_json(receipt_values[0]) if receipt_values else ()
        return Header(*values), scalars, receipts
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(
            f"a frame's header does not parse ({error}): it was damaged or forged, ask for it again"
        ) from None


def _check_header(values: Any) -> None:
    """Raise ValueError unless some values have the types and ranges of a header's fields."""
    fields = dataclasses.fields(Header)
    if len(values) not in (PLAIN_FIELDS, SECURE_FIELDS, len(fields)):
        raise ValueError("its fields are not those of a header")
    # one text for each header
    if values[PLAIN_FIELDS:] == SECURE_DEFAULTS or values[SECURE_FIELDS:] == [NO_DEADLINE]:
        raise ValueError("its fields are not those of a header")
    for value, field in zip(values, fields, strict=False):
        # the exact type: a JSON true would pass as an integer
        if type(value).__name__ != field.type:
            raise ValueError("its fields are not those of a header")
    for value in values:
        # counts fit into int64
        if type(value) is int and not 0 <= value < 1 << 63:
            raise ValueError("a count is out of range")


def decode(data: bytes, message: type[A]) -> tuple[Header, A]:
    """Return the header and the message (a batch of one) of a request.

    Args:
        data: the frame.
        message: class of the message.

    Raises:
        FrameError: the frame does not parse, lacks a field of the class, has a field of another
            type, has other fields, or has receipts, which only replies have.
    """
    header, decoded, receipts = decode_reply(data, message)
    if receipts:
        raise FrameError("a request has receipts, which only replies have: the frame is refused")
    return header, decoded


def decode_reply(data: bytes, message: type[A]) -> tuple[Header, A, Receipts]:
    """Return the header, the message (a batch of one) and the receipts of a reply.

    Args:
        data: the frame.
        message: class of the message.

    Raises:
        RefusedError: the frame is a refusal.
        FrameError: the frame does not parse, lacks a field of the class, has a field of another
            type, has other fields, or receipts of other fields.
    """
    text, tensors = _read(data)
    header, scalars, receipts = _header(text)
    if isinstance(scalars, dict) and list(scalars) == [REFUSED] and not tensors:
        code = scalars[REFUSED]
        if not isinstance(code, str) or code not in SENTENCES:
            raise FrameError(
                "a frame refuses a request by a code that does not exist: both sides must run the "
                "same version"
            )
        raise refused(header, code)
    # a field that is both a scalar and a tensor has no one value
    if not isinstance(scalars, dict) or not scalars.keys().isdisjoint(tensors):
        raise FrameError(
            f"a {message.__name__} frame does not parse: it was damaged or forged, ask for it again"
        )
    fields: dict[str, Any] = {}
    for name, field_kind in kinds(cast(Hashable, message)).items():
        source: Scalars = scalars
        if field_kind in (Shared, Rows, Picks):
            source = tensors
        value = source.pop(name, None)
        if value is None and not optional(cast(Hashable, message), name):
            raise FrameError(
                f"a {message.__name__} frame lacks the field {name!r}: both sides must run the "
                "same version"
            )
        fields[name] = _wrap(message, name, field_kind, value)
    # every field of the class has been removed, so the others are unknown
    extra = sorted([*scalars, *tensors])
    if extra:
        raise FrameError(
            f"a {message.__name__} frame has unknown fields {extra}: both sides must run the same "
            "version"
        )
    _check_receipts(message, receipts)
    return header, message(**fields), receipts


def _check_receipts(message: type, receipts: Receipts) -> None:
    """Raise FrameError for receipts of fields that a message does not have."""
    # those of fields that the message holds in another form are named beside its own
    field_names = {*kinds(cast(Hashable, message)), *getattr(message, "__hidden_fields__", ())}
    for receipt in receipts:
        unknown = sorted(set(receipt.fields) - field_names)
        if unknown:
            raise FrameError(
                f"a {message.__name__} frame has a receipt of {unknown[0]!r}, which it does not "
                "have: the frame is refused"
            )


def _wrap(message: type, name: str, field_kind: type, value: Any) -> Any:
    """Return a decoded value as a field of a batch of one.

    Args:
        message: class of the message, for errors.
        name: name of the field, for errors.
        field_kind: class of the field.
        value: tensor or scalar; None for a field that is absent.
    """
    if value is None:
        return None
    label = f"{message.__name__}.{name}"
    if field_kind is Shared:
        return Shared(value)
    if field_kind is Rows:
        return Rows(value[None])
    if field_kind is Picks:
        if value.ndim == 0:
            raise FrameError(f"{label}: rows were expected, a single number came")
        all_rows = tuple(range(len(value)))
        return Picks(value, (all_rows,))
    # the exact type: a JSON true would pass as an integer
    value_type = type(value)
    if value_type is not field_kind:
        raise FrameError(f"{label}: {field_kind.__name__} was expected, {value_type.__name__} came")
    return value
