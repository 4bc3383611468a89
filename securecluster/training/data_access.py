"""What a client method may read of its clients' data, and what it has read.

The declaration of a method (`@answers`) says whether its reply depends on data and on training. A
trainer lets a method read what its declaration covers, and nothing else, so that a declaration that
is wrong ends in a refusal and not in a price that is too low.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from securecluster.errors import PolicyError
from securecluster.training.config import LocalTraining

TRAIN = "train"


@dataclass
class Reads:
    """Reads of clients' data in one call.

    Args:
        data: names of the trainer's methods that returned data or what follows from it; training
            is not among them.
        trainings: each training.
    """

    data: set[str] = field(default_factory=set)
    trainings: list[Training] = field(default_factory=list)


class Training(NamedTuple):
    """A local training in a call.

    Args:
        plan: its hyper-parameters.
        clients: positions of the clients that trained.
        step: number of the call that its draws follow from.
    """

    plan: LocalTraining
    clients: tuple[int, ...]
    step: int


@dataclass
class _Call:
    """Permissions of a method in the current call.

    Args:
        method: its name, for messages.
        reads: what it has read.
        may_read: whether it may read data.
        may_train: whether it may train.
        clients: positions of the clients that are called; None for all.
        postprocessing: whether it computes from released numbers alone.
        round: number of the round.
    """

    method: str
    reads: Reads
    may_read: bool
    may_train: bool
    clients: Collection[int] | None = None
    postprocessing: bool = False
    round: int = 0


class DataAccess:
    """Access of one trainer's callers to its clients' data.

    Outside of calls everything may be read: a client is built from its data, and metrics are of its
    own.
    """

    def __init__(self) -> None:
        self._call: _Call | None = None
        # whether the relation of neighbours keeps clients' numbers of samples
        self.public_counts = False
        self._tables: list[tuple[Any, int]] = []  # samples, and how often they were changed

    def watch(self, tables: Sequence[Any]) -> None:
        """Refuse calls that change clients' samples in memory.

        Whatever is computed of all rows would then be in each of them, before any clip.

        Args:
            tables: tensors of the samples.
        """
        # torch counts no changes of tensors that were made in inference mode
        counted = [table for table in tables if not table.is_inference()]
        self._tables = [(table, table._version) for table in counted]

    @contextmanager
    def during(
        self,
        method: str,
        may_read: bool,
        may_train: bool,
        clients: Collection[int] | None = None,
        round: int = 0,
    ) -> Iterator[Reads]:
        """Allow a method what its declaration covers, and yield what it reads.

        Args:
            method: its name, for messages.
            may_read: whether its reply may depend on data.
            may_train: whether its reply may depend on training.
            clients: positions of the clients that are called; None allows the data of all.
            round: number of the round, from 1, or 0 before the first one.

        Raises:
            PolicyError: the method changed samples in memory.
        """
        reads = Reads()
        self._call = _Call(method, reads, may_read, may_train, clients, round=round)
        try:
            yield reads
        finally:
            self._call = None
        if any(table._version != version for table, version in self._tables):
            raise PolicyError(
                f"{method} changes its clients' samples in memory, which all later trainings would "
                "use: work on a copy (clone)"
            )

    @property
    def round(self) -> int:
        """Return the number of the round of the current call; 0 outside of calls."""
        return 0 if self._call is None else self._call.round

    def read(self, name: str, clients: Sequence[int] = (), released: bool = False) -> None:
        """Note that data are read.

        Args:
            name: of the trainer's method that returns them.
            clients: positions of the clients whose data they are, where the method takes some.
            released: whether the method returns what has left already, with noise, and nothing
                else, so that nothing that follows needs noise of its own.

        Raises:
            PolicyError: the declaration of the called method does not cover it.
        """
        call = self._call
        if call is None:
            return
        if call.postprocessing:
            raise PolicyError(_read_in_postprocessing(call.method, name))
        if not call.may_read:
            raise PolicyError(
                f"{call.method} tells nothing new of clients' data, as it declares (private=False "
                f"or derived=True), and reads cohort.{name}: leave the declaration out"
            )
        _refuse_others(call, name, clients)
        if not released:
            call.reads.data.add(name)

    def read_counts(self, name: str) -> None:
        """Note that numbers of samples are read, which are data unless they are public.

        Args:
            name: of the trainer's member that holds them.

        Raises:
            PolicyError: the declaration of the called method does not cover it.
        """
        if not self.public_counts:
            self.read(name)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Allow neither reads nor trainings until the end of the context."""
        call = self._call
        if call is not None:
            self._call = replace(call, postprocessing=True)
        try:
            yield
        finally:
            self._call = call

    @contextmanager
    def train(self, plan: LocalTraining, clients: Sequence[int], step: int) -> Iterator[None]:
        """Note a training, which reads data by itself.

        Args:
            plan: its hyper-parameters.
            clients: positions of the clients that train.
            step: number of the call that its draws follow from.

        Raises:
            PolicyError: the declaration of the called method does not cover it.
        """
        call = self._call
        if call is None:
            yield
            return
        if call.postprocessing:
            raise PolicyError(_read_in_postprocessing(call.method, TRAIN))
        if not call.may_train:
            raise PolicyError(
                f'{call.method} trains, and its @answers does not say so: add trains="usual", by '
                "which DP-SGD is priced"
            )
        _refuse_others(call, TRAIN, clients)
        call.reads.trainings.append(Training(plan, tuple(clients), step))
        self._call = None  # what training itself reads is its own
        try:
            yield
        finally:
            self._call = call


def _refuse_others(call: _Call, name: str, clients: Sequence[int]) -> None:
    """Raise PolicyError for data of clients that are not called: a node of one has none of them."""
    if call.clients is None:
        return
    others = [k for k in clients if k not in call.clients]
    if others:
        raise PolicyError(
            f"{call.method} uses cohort.{name} for a client that was not called (at position "
            f"{others[0]}): take those of context.positions alone"
        )


def _read_in_postprocessing(method: str, name: str) -> str:
    """Return the sentence on a read of data where released numbers alone are used."""
    return (
        f"{method} reads cohort.{name} in a function that it gives to context.postprocess, which "
        "may use released numbers alone: release what it computes of data"
    )
