"""Callbacks of a run: who is told of each round from outside, and may stop it.

Security rule: a callback gets a copy of the round's history line, which is the observer's, and a
function that takes a reason. No reference leads from either to the run, an update or data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from securecluster.errors import UsageError
from securecluster.runtime.run import Line


class Callback(Protocol):
    """What `fit` tells of each round: a tracker, or a condition to stop."""

    def on_round(self, line: Line, stop: Callable[[str], None]) -> None:
        """Receive a round that has ended and is in the checkpoint.

        Args:
            line: the round's line of the history; a copy.
            stop: ends the run after this round; called with the reason.
        """


class Watcher:
    """Who watches a run: what prints its rounds, and callbacks.

    Args:
        report: called with the line of each round of this process.
        callbacks: called with the line of every round; those of a run that is resumed get the
            earlier lines first, so that they know what they knew before it was stopped.

    Raises:
        UsageError: a callback without `on_round`.
    """

    def __init__(
        self, report: Callable[[Line], None] = lambda line: None, callbacks: Iterable[Callback] = ()
    ) -> None:
        self._report = report
        if not isinstance(callbacks, Iterable):
            raise UsageError(f"callbacks = {callbacks!r}: give a list of objects with on_round")
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if not callable(getattr(callback, "on_round", None)):
                raise UsageError(
                    f"the callback {callback!r} has no on_round: give an object with a method "
                    "on_round(line, stop)"
                )

    def catch_up(self, lines: Sequence[Line]) -> str | None:
        """Tell callbacks of rounds that ended before the run was resumed.

        Returns:
            Who stops the run, and why; None if nobody does.
        """
        reasons = [self._ask(line) for line in lines]
        return next((reason for reason in reversed(reasons) if reason), None)

    def told(self, line: Line) -> str | None:
        """Tell everybody of a round that has ended.

        Returns:
            Who stops the run, and why; None if nobody does.
        """
        self._report(line)
        return self._ask(line)

    def _ask(self, line: Line) -> str | None:
        """Return who of the callbacks stops the run after a round, and why."""
        reasons: list[str] = []
        for callback in self._callbacks:
            name = type(callback).__name__
            given: list[Any] = []
            try:
                callback.on_round(copy.deepcopy(line), given.append)
            except Exception as error:
                raise UsageError(
                    f"the callback {name} failed after round {line['round']} "
                    f"({type(error).__name__}: {error}): correct it and call fit again, which goes "
                    "on after this round where the run has a folder"
                ) from error
            reasons += [f"{name}: {reason}" for reason in given]
        return "; ".join(reasons) or None
