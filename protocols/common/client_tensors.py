"""What clients keep from call to call, as tensors that a client's class declares.

class NearestCentreClient(AssignedModelClient):
    moved = ClientTensor("dimension")

A declared tensor has a row for each client. Checkpoints, resumed runs and clients in processes of
their own keep it without further code.

`client.state()` is all of a client between two calls: a node may be a new process for every frame.
Nothing in it grows with the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown

DIMENSION = "dimension"
MODEL = "model"
DTYPES = (MODEL, "int64", "bool", "uint8")
ROWS = "_client_rows"  # attribute of a client that holds its declared tensors, by name


class ClientRows:
    """The rows of some clients, as calls read and change them.

    Args:
        values: (m, *shape), in the order of the clients' positions.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, positions: int | Sequence[int]) -> torch.Tensor:
        """Return the row of a client, or a copy of the rows of several.

        Args:
            positions: of the clients, such as `context.positions`.
        """
        return self.values[_index(positions)]

    def __setitem__(self, positions: int | Sequence[int], rows: Any) -> None:
        """Replace the row of a client, or the rows of several.

        Args:
            positions: of the clients, such as `context.positions`.
            rows: one number or row for each of them, or one for all.
        """
        self.values[_index(positions)] = torch.as_tensor(rows).to(self.values)


class ClientTensor:
    """Declaration of a tensor with a row for each client, in the body of a client's class.

    Args:
        shape: of one client's row: whole numbers, or "dimension" for the model's d; none for one
            number.
        start: that rows begin with: a number, or "model" for the initial model θ_0.
        dtype: "model" for the type of the model's weights, "int64", "bool" or "uint8".
        lasting: True for what a client answers in one way in a run: a newcomer's node keeps it when
            it joins the run again, where everything else begins anew.

    Raises:
        UsageError: another dtype.
    """

    def __init__(
        self, *shape: int | str, start: float | str = 0, dtype: str = MODEL, lasting: bool = False
    ) -> None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        self._shape = shape
        self._start = start
        self._dtype = dtype
        self.lasting = lasting
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def key(self) -> str:
        """Return the name under which checkpoints have the tensor."""
        return self.name.lstrip("_")

    @overload
    def __get__(self, client: None, owner: type) -> ClientTensor: ...

    @overload
    def __get__(self, client: object, owner: type) -> ClientRows: ...

    def __get__(self, client: Any, owner: type) -> ClientTensor | ClientRows:
        if client is None:
            return self
        rows = vars(client).setdefault(ROWS, {})
        if self.name not in rows:
            rows[self.name] = ClientRows(self._first(client))
        client_rows: ClientRows = rows[self.name]
        return client_rows

    def __set__(self, client: Any, values: torch.Tensor) -> None:
        """Replace the rows of all clients.

        Raises:
            UsageError: no tensor, or one of another shape.
        """
        if not isinstance(values, torch.Tensor):
            raise UsageError(
                f"{type(client).__name__}.{self.name} is a declared tensor, and was set to a "
                f"{type(values).__name__}: give it rows, or another name if a base sets it"
            )
        mine = self.__get__(client, type(client)).values
        if values.shape != mine.shape:
            raise UsageError(
                f"{type(client).__name__}.{self.name} has a row for each client, "
                f"{tuple(mine.shape)}, and was set to {tuple(values.shape)}: set the rows of some "
                f"clients by self.{self.name}[context.positions] = rows"
            )
        # a copy, since rows are changed in place
        rows = values.to(mine.device, mine.dtype, copy=True)
        vars(client)[ROWS][self.name] = ClientRows(rows)

    def _first(self, client: Any) -> torch.Tensor:
        """Return the rows of all clients before any call.

        Raises:
            UsageError: a size or a start of another name.
        """
        cohort = client.cohort
        clients = len(cohort.ids)
        model: torch.Tensor = cohort.start
        shape = [self._size(size, cohort) for size in self._shape]
        if self._start == MODEL:
            return model.repeat(clients, 1)
        if isinstance(self._start, str):
            raise UsageError(
                f"{self.name} begins with {self._start!r}, which is neither a number nor 'model'"
            )
        if self._dtype == MODEL:
            return model.new_full((clients, *shape), self._start)
        # on the CPU, since they steer Python's loops
        return torch.full((clients, *shape), self._start, dtype=getattr(torch, self._dtype))

    def _size(self, size: int | str, cohort: Any) -> int:
        if size == DIMENSION:
            return int(cohort.model.dimension)
        if isinstance(size, str):
            raise UsageError(
                f"{self.name} has a size {size!r}: give whole numbers, or {DIMENSION!r} for that "
                "of the model"
            )
        return size


def _index(positions: int | Sequence[int]) -> int | torch.Tensor:
    if isinstance(positions, int):
        return positions
    # a tuple would be an index into several axes, and torch reads long lists slowly
    try:
        return torch.from_numpy(np.fromiter(positions, np.int64, len(positions)))
    except TypeError:
        raise UsageError(
            "a ClientTensor is read and written by clients alone, as rows[positions]: take whole "
            "rows, and columns of these"
        ) from None


def declared_tensors(client: type) -> dict[str, ClientTensor]:
    """Return the tensors that a client's class and its bases declare, by name.

    Args:
        client: the class.
    """
    declared: dict[str, ClientTensor] = {}
    for base in reversed(client.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, ClientTensor):
                declared[name] = value
            else:
                declared.pop(name, None)  # the subclass has something else in its place
    return declared


def check_names(client: type) -> None:
    """Check that the tensors of a client's class hide nothing that its bases have.

    Args:
        client: the class.

    Raises:
        UsageError: a base has something of that name.
    """
    for name, value in vars(client).items():
        if not isinstance(value, ClientTensor):
            continue
        for base in client.__mro__[1:]:
            if name in vars(base):
                raise UsageError(
                    f"{client.__name__}.{name} has the name of something that {base.__name__} has: "
                    "give the tensor another name"
                )


def kept_rows(client: Any) -> dict[str, torch.Tensor]:
    """Return the declared tensors of a client by their names in checkpoints.

    Args:
        client: an object whose class declares them.
    """
    rows_by_key = {}
    for name, tensor in declared_tensors(type(client)).items():
        rows_by_key[tensor.key] = getattr(client, name).values
    return rows_by_key


def restore_rows(client: Any, memory: Mapping[str, torch.Tensor]) -> None:
    """Restore what `kept_rows` returned.

    Tensors that an earlier version did not keep begin as they are declared.

    Args:
        client: an object whose class declares the tensors.
        memory: by the names in checkpoints.
    """
    vars(client).pop(ROWS, None)
    for name, tensor in declared_tensors(type(client)).items():
        if tensor.key in memory:
            start = getattr(client, name).values
            setattr(client, name, _all_rows(start, memory[tensor.key]))


def _all_rows(start: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a checkpoint, of which earlier versions kept the rows of some clients.

    Args:
        start: (m, *shape) the rows of all others; it may be overwritten.
        saved: as the checkpoint has it.
    """
    if start.dtype == torch.bool and saved.dtype == torch.int64:  # positions of what is True
        start[saved] = True
        return start
    # each row after its position
    if start.dtype == torch.int64 and saved.shape[1:] == (1 + start.shape[1:].numel(),):
        start[saved[:, 0]] = saved[:, 1:].reshape(-1, *start.shape[1:])
        return start
    return saved


def check_kept(client: Any, memory: Mapping[str, torch.Tensor]) -> None:
    """Check that a checkpoint has all declared tensors of a client.

    Args:
        client: an object whose class declares them.
        memory: that is to be written.

    Raises:
        UsageError: other state of the client has the name of one.
    """
    for name, tensor in declared_tensors(type(client)).items():
        if memory.get(tensor.key) is not getattr(client, name).values:
            raise UsageError(
                f"{type(client).__name__} keeps something else under the name {tensor.key!r}, too: "
                "give the tensor another name"
            )
