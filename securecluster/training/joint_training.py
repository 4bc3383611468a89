"""Local training of several runs as one batch: runs in threads that wait for each other.

Runs of one protocol with other seeds or other noise train models of the same shape at the same
time. On a GPU a step of twenty small models takes as long as one of two hundred, so their clients
train as one stack. Each client's numbers are those that its own run computes, up to rounding.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from securecluster.core.lazy_torch import torch

T = TypeVar("T")


@dataclass
class Request:
    """Clients of one run that are to train now.

    Attributes:
        run: number of the run.
        trainer: the run's `LocalTrainer`.
        weights: (b, d) initial weights, changed in place.
        clients: positions of the clients, most steps first.
        task: the call of `LocalTrainer.train`.
        means: θ̄ or g of the clients, (b, d), where their loss has a term with it.
        equal: whether the initial weights of all clients are equal.
        done: whether the clients have trained, or an error has stopped them.
        error: the error.
    """

    run: int
    trainer: Any
    weights: torch.Tensor
    clients: Sequence[int]
    task: Any
    means: torch.Tensor | None = None
    equal: bool = False
    done: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class Member:
    """Membership of one run in a joint training.

    Attributes:
        meeting: where the runs wait for each other.
        run: number of the run.
    """

    meeting: JointTraining
    run: int

    def train(self, request: Request) -> None:
        """Train clients together with those of the other runs.

        Args:
            request: the clients of this run.
        """
        self.meeting.train(replace(request, run=self.run))


_member: contextvars.ContextVar[Member | None] = contextvars.ContextVar("member", default=None)


def current() -> Member | None:
    """Return the place of this thread's run, or None where it trains alone."""
    return _member.get()


@dataclass
class JointTraining:
    """A meeting of runs, each in a thread.

    Clients train when every run that has not ended waits for it. What trains together therefore
    does not depend on which thread is faster.

    Attributes:
        train_together: trains the clients of requests as one batch, in place.
        running: numbers of the runs that have not ended.
    """

    train_together: Callable[[Sequence[Request]], None]
    running: set[int]
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _waiting: list[Request] = field(default_factory=list, repr=False)

    @contextmanager
    def member(self, run: int) -> Iterator[None]:
        """Let this thread's training be that of one run, until the block ends.

        Args:
            run: number of the run, one of `running`.
        """
        token = _member.set(Member(self, run))
        try:
            yield
        finally:
            _member.reset(token)
            # also after an error, since the other runs would wait for this one
            self._leave(run)

    def train(self, request: Request) -> None:
        """Wait for the other runs, and train with them.

        Args:
            request: of this thread's run.

        Raises:
            BaseException: what stopped the training.
        """
        with self._changed:
            self._waiting.append(request)
            self._train_if_all_wait()
            self._changed.wait_for(lambda: request.done)
        if request.error is not None:
            raise request.error

    def _leave(self, run: int) -> None:
        """Go on without a run that has ended."""
        with self._changed:
            self.running.discard(run)
            self._train_if_all_wait()

    def _train_if_all_wait(self) -> None:
        """Train all requests if no run is left that may still make one."""
        if not self._waiting or len(self._waiting) < len(self.running):
            return
        # by number and not by arrival, so that rounding does not depend on the threads' order
        requests = sorted(self._waiting, key=lambda request: request.run)
        self._waiting = []
        try:
            self.train_together(requests)
        except BaseException as error:
            # all runs of the batch have failed, not only the one whose thread trained it
            for request in requests:
                request.error = error
        for request in requests:
            request.done = True
        self._changed.notify_all()


def in_threads(
    train_together: Callable[[Sequence[Request]], None], runs: Sequence[Callable[[], T]]
) -> list[T]:
    """Carry out runs in threads, whose clients train together, and return their results in order.

    Args:
        train_together: trains the clients of requests as one batch, in place.
        runs: functions, each of which carries out one run.

    Raises:
        BaseException: the error of the first run that has one, when all have ended.
    """
    meeting = JointTraining(train_together, set(range(len(runs))))
    results: list[Any] = [None] * len(runs)
    errors: list[BaseException | None] = [None] * len(runs)

    def carry_out(run: int) -> None:
        with meeting.member(run):
            try:
                results[run] = runs[run]()
            except BaseException as error:
                errors[run] = error

    threads = [threading.Thread(target=carry_out, args=(run,)) for run in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results
