"""Parcels: what moves between the processes of one run, with its tensors beside the rest.

Security rule: parcels are pickled, so that whoever writes one can run code where it is opened. They
move between processes that one user has started, and nothing that another party sends is one.
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch

PackedMessage = tuple[bytes, list[NDArray[np.uint8]]]


def packed(content: Any) -> PackedMessage:
    """Return an object as a parcel.

    Of a tensor that is a view only its own numbers move, and a tensor on a GPU arrives on the
    recipient's.

    Args:
        content: of objects that cloudpickle takes.
    """
    buffers: list[NDArray[np.uint8]] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), np.uint8))

    file = io.BytesIO()
    _pickler()(file, protocol=5, buffer_callback=keep).dump(content)
    return file.getvalue(), buffers


def opened(packed_message: PackedMessage) -> Any:
    """Return a new object that equals the one that was packed.

    Args:
        parcel: of this user's own processes.
    """
    head, buffers = packed_message
    return pickle.loads(head, buffers=buffers)


def size(packed_message: PackedMessage) -> int:
    """Return the bytes of a parcel.

    Args:
        parcel: the parcel.
    """
    head, buffers = packed_message
    return len(head) + sum(buffer.nbytes for buffer in buffers)


@cache
def _pickler() -> Any:
    """Return the class that pickles, with numbers in buffers of their own."""
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            # no subclass, such as the parameters of a module
            if type(value) is torch.Tensor and not value.requires_grad:
                flat = value.detach().cpu().reshape(-1)
                if flat.stride(0) != 1:  # one number that all entries share
                    flat = flat.clone(memory_format=torch.contiguous_format)
                octets: Any = flat.view(torch.uint8).numpy()
                buffer = pickle.PickleBuffer(octets)
                return _tensor, (buffer, value.dtype, tuple(value.shape), value.device.type)
            if type(value) is np.ndarray and not value.dtype.hasobject:
                numbers: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                return _array, (pickle.PickleBuffer(numbers), value.dtype, value.shape)
            return super().reducer_override(value)

    return Pickler


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return a tensor in memory of its own, which torch aligns: products round by it."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(buffer, np.uint8)
    if device == "cuda" and torch.cuda.is_available():
        return tensor.cuda()
    return tensor


def _array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array in memory of its own, which may be written to."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(buffer, np.uint8)
    return array
