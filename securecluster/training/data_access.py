"""What a client method may read of its clients' data, and what it has read.

The declaration of a method (`@answers`) says whether its reply depends on data and on training. A
trainer lets a method read what its declaration covers, and nothing else, so that a declaration that
is wrong ends in a refusal and not in a price that is too low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from securecluster.errors import PolicyError
from securecluster.training.config import LocalTraining

TRAIN = "train"


@dataclass
class Reads:
    """Reads of clients' data in one call.

    Args:
        data: names of the trainer's methods that returned data or what follows from it; training
            is not among them.
        trainings: hyper-parameters of each training, and the positions of the clients that
            trained.
    """

    data: set[str] = field(default_factory=set)
    trainings: list[tuple[LocalTraining, tuple[int, ...]]] = field(default_factory=list)


@dataclass
class _Call:
    """What a method may do in the current call.

    Args:
        method: its name, for messages.
        reads: what it has read.
        may_read: whether it may read data.
        may_train: whether it may train.
        postprocessing: whether it computes from released numbers alone.
    """

    method: str
    reads: Reads
    may_read: bool
    may_train: bool
    postprocessing: bool = False


class DataAccess:
    """Access of one trainer's callers to its clients' data.

    Outside of calls everything may be read: a client is built from its data, and metrics are of its
    own.
    """

    def __init__(self) -> None:
        self._call: _Call | None = None

    @contextmanager
    def during(self, method: str, may_read: bool, may_train: bool) -> Iterator[Reads]:
        """Allow a method what its declaration covers, and yield what it reads.

        Args:
            method: its name, for messages.
            may_read: whether its reply may depend on data.
            may_train: whether its reply may depend on training.
        """
        reads = Reads()
        self._call = _Call(method, reads, may_read, may_train)
        try:
            yield reads
        finally:
            self._call = None

    def read(self, name: str) -> None:
        """Note that data are read.

        Args:
            name: of the trainer's method that returns them.

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
        call.reads.data.add(name)

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
    def train(self, plan: LocalTraining, clients: Sequence[int]) -> Iterator[None]:
        """Note a training, which reads data by itself.

        Args:
            plan: its hyper-parameters.
            clients: positions of the clients that train.

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
        call.reads.trainings.append((plan, tuple(clients)))
        self._call = None  # what training itself reads is its own
        try:
            yield
        finally:
            self._call = call


def _read_in_postprocessing(method: str, name: str) -> str:
    """Return the sentence on a read of data where released numbers alone are used."""
    return (
        f"{method} reads cohort.{name} in a function that it gives to context.postprocess, which "
        "may use released numbers alone: release what it computes of data"
    )
