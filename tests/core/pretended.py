"""A device that exists in name only: what lies on it refuses to meet main memory, and rounds
differently.

Its tensors are computed in main memory. As on CUDA, it is an error to combine them with a CPU
tensor, to turn them into numpy, or to index a CPU tensor by them; and their products and sums
differ from the CPU's in the last places, so numbers are equal bit for bit only if they were
computed in the same place. This does not show that CUDA has a kernel for an operation, or that the
kernel is deterministic or right: `benchmarks.gpu` does, where there is a GPU.

`counted` counts what a GPU would have been asked to do. An operation of torch's dispatcher that
computes counts as one launch; a kernel of a GPU may take more.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"  # the one device besides the CPU that every torch knows
PRETENDED = torch.device(NAME)
aten: Any = torch.ops.aten

# Operations that take tensors of both places on CUDA: copies, and indices from main memory.
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Operations that round differently on the pretended device.
ROUNDED = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.baddbmm_, aten.sum, aten.mean}
ROUNDED |= {aten.convolution, aten._softmax, aten.linalg_vector_norm, aten.sqrt, aten.log, aten.cos}
FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
SUBSCRIPTS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


# Operations whose result has a shape, or is a number, that the host must know: it waits for both.
AWAITED = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
}
# Operations that only reserve memory, or give it another shape.
RESERVING = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
}


@dataclass
class Costs:
    """What a GPU would have been asked to do, in counts.

    Attributes:
        launches: operations on the device that compute or copy something, by name.
        waits: operations for whose result the host waits, by name and line of the project.
        uploads: copies from main memory to the device, by line of the project.
        to_host: bytes that are copied to main memory, by line of the project.
        from_host: bytes that are copied to the device.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    from_host: int = 0

    def note(self, func: Any, args: Any, there: bool) -> None:
        """Count one operation.

        Args:
            func: the operation.
            args: its arguments.
            there: whether its result lies on the device.
        """
        name = func.overloadpacket.__name__
        source = next((v for v in tree_leaves(args) if isinstance(v, Placed)), None)
        copied = args[1] if func is aten.copy_.default else args[0] if args else None
        if func in COPIES and there and not isinstance(copied, Placed):
            self._note_upload(copied)
        elif func in COPIES and not there:
            self._note_download(name, copied)
        elif func in AWAITED:
            self._note_download(name, source if func is aten._local_scalar_dense.default else None)
            self.launches[name] += func is not aten._local_scalar_dense.default
        elif func in INDEXED:
            self._note_index(name, args)
        elif there and not func.is_view and func not in RESERVING:
            self.launches[name] += 1

    def _note_upload(self, copied: torch.Tensor) -> None:
        self.uploads[_line()] += 1
        self.from_host += copied.numel() * copied.element_size()

    def _note_download(self, name: str, copied: torch.Tensor | None) -> None:
        line = _line()
        self.waits[name, line] += 1
        if copied is not None:
            self.to_host[line] += copied.numel() * copied.element_size()

    def _note_index(self, name: str, args: Any) -> None:
        self.launches[name] += 1
        for index in args[1]:
            if isinstance(index, Placed) and index.dtype in (torch.bool, torch.uint8):
                self._note_download(name, None)  # the positions of a mask are found first
            elif isinstance(index, torch.Tensor) and not isinstance(index, Placed):
                self._note_upload(index)


_counting: list[Costs] = []


@contextmanager
def counted() -> Iterator[Costs]:
    """Yield the costs of what runs on the pretended device until the end of the context."""
    costs = Costs()
    _counting.append(costs)
    try:
        yield costs
    finally:
        _counting.remove(costs)


def _line() -> str:
    """Return the innermost line of the project that is being executed."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if {"securecluster", "protocols"} & set(path.parts[-5:-1]) and "tests" not in path.parts:
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Placed(torch.Tensor):
    """A tensor that says it lies on the pretended device; `held` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Placed:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PRETENDED,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"Placed({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        found: torch.Tensor = Placed(self.held.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            found = torch.nn.Parameter(found, self.requires_grad)
        memo[id(self)] = found
        return found

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor on the pretended device cannot become numpy: use .cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute one operation in main memory; refuse tensors of two places."""
    _check_places(func, args, kwargs)
    given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Placed)]
    to = kwargs.get("device")
    there = bool(given) if to is None else torch.device(to).type == NAME
    if func is aten.copy_.default:
        there = isinstance(args[0], Placed)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    bare_args, bare_kwargs = tree_map(_bare, (args, kwargs))
    found = func(*bare_args, **bare_kwargs)
    for costs in _counting:
        costs.note(func, args, there)
    if not there:
        return found
    if func.overloadpacket in ROUNDED and found.is_floating_point():
        found.mul_(1 + 8 * torch.finfo(found.dtype).eps)
    known = {id(v.held): v for v in given}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Placed):
            return value
        return known.get(id(value)) if id(value) in known else Placed(value)

    return tree_map(wrapped, found)


def _check_places(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    others = [v for v in tensors if not isinstance(v, Placed)]
    if any(v.device.type == NAME for v in others):
        raise RuntimeError(
            f"{func}: a tensor without numbers: this harness does not know how it was made"
        )
    apart = [v for v in others if v.ndim]  # CUDA takes single numbers from main memory
    if func in INDEXED and isinstance(args[0], Placed):
        indices = {id(v) for v in args[1] if v is not None}
        apart = [v for v in apart if id(v) not in indices]
    if apart and len(others) < len(tensors) and func not in COPIES:
        shapes = [tuple(v.shape) for v in apart]
        raise RuntimeError(
            f"{func}: expected all tensors on the same device, {shapes} lie in main memory"
        )


def _bare(value: Any) -> Any:
    return value.held if isinstance(value, Placed) else value


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        made_there = to is not None and torch.device(to).type == NAME
        if made_there or any(isinstance(v, Placed) for v in tree_leaves((args, kwargs))):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class _Factories(TorchFunctionMode):
    """What torch makes of Python's numbers before it asks its dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.new_tensor:
            like, *rest = args
            made = torch.tensor(*rest, **{"dtype": like.dtype, **kwargs, "device": "cpu"})
            return made.to(kwargs.get("device", like.device))
        to = kwargs.get("device")
        if func in FROM_DATA and to is not None and not isinstance(args[0], torch.Tensor):
            return func(*args, **{**kwargs, "device": "cpu"}).to(to)
        if func in SUBSCRIPTS and isinstance(args[0], Placed):
            args = (args[0], _subscript(args[1]), *args[2:])
        return func(*args, **kwargs)


def _subscript(index: Any) -> Any:
    """Turn lists into tensors: torch would look for their numbers on the device."""
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.long)
    return tuple(map(_subscript, index)) if isinstance(index, tuple) else index


@contextmanager
def pretending() -> Iterator[None]:
    with _Factories(), _Operations():
        yield
