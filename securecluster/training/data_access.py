"""What a client method may read of its clients' data, and what it has read.

The declaration of a method (`@answers`) says whether its reply depends on data and on training. A
trainer lets a method read what its declaration covers, and nothing else, so that a declaration that
is wrong ends in a refusal and not in a price that is too low.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from securecluster.errors import PolicyError
from securecluster.training.config import LocalTraining

TRAIN = "train"


@dataclass
class Reads:
    """Reads of clients' data in one call.

    Args:
        data: names of the trainer's methods that returned data or what follows from it; training
            is not among them.
        plans: hyper-parameters of the trainings.
    """

    data: set[str] = field(default_factory=set)
    plans: list[LocalTraining] = field(default_factory=list)


@dataclass
class _Call:
    """What a method may do in the current call.

    Args:
        method: its name, for messages.
        reads: what it has read.
        may_read: whether it may read data.
        may_train: whether it may train.
    """

    method: str
    reads: Reads
    may_read: bool
    may_train: bool


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
        if not call.may_read:
            raise PolicyError(
                f"{call.method} tells nothing new of clients' data, as it declares (private=False "
                f"or derived=True), and reads cohort.{name}: leave the declaration out"
            )
        call.reads.data.add(name)

    @contextmanager
    def train(self, plan: LocalTraining) -> Iterator[None]:
        """Note a training, which reads data by itself.

        Args:
            plan: its hyper-parameters.

        Raises:
            PolicyError: the declaration of the called method does not cover it.
        """
        call = self._call
        if call is None:
            yield
            return
        if not call.may_train:
            raise PolicyError(
                f'{call.method} trains, and its @answers does not say so: add trains="usual", by '
                "which DP-SGD is priced"
            )
        call.reads.plans.append(plan)
        self._call = None  # what training itself reads is its own
        try:
            yield
        finally:
            self._call = call
