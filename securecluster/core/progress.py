"""Progress of work that may take long: lines for whoever prints those of a run, and bars.

Lines go by logging, to which only the app attaches a printer: a mechanism neither prints nor knows
the run. A bar shows how far a call from Python is, and the time left.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# its records of level INFO are lines for the user
logger = logging.getLogger("securecluster.progress")
EVERY_S = 3.0  # seconds from one line to the next
LONG_S = 30.0  # seconds after which work that nobody can look into is told of
_inside: ContextVar[bool] = ContextVar("_inside", default=False)  # of the context of a bar


def progress_logger(work: str) -> Callable[[int, int], None]:
    """Return a function that is called after each step, and logs a line every `EVERY_S` seconds.

    Work that takes less says nothing.

    Args:
        work: what is done, the beginning of each line.

    Returns:
        A function of the number of steps that are done, and that of all steps.
    """
    last = time.monotonic()

    def watch(done: int, steps: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY_S:
            return
        last = now
        logger.info("%s %d of %d", work, done, steps)

    return watch


@contextmanager
def told_while_running(work: str) -> Iterator[None]:
    """Warn that work still goes on, after `LONG_S` seconds and then whenever they have doubled.

    Work that ends before says nothing, and none is stopped. It is a warning of `logger`, which
    Python prints where nobody has attached a printer.

    Args:
        work: what is done, the beginning of the sentence.
    """
    ended = threading.Event()

    def watch() -> None:
        begun = time.monotonic()
        wait = LONG_S
        while not ended.wait(wait):
            passed = time.monotonic() - begun
            logger.warning("%s has not returned for %s", work, duration(passed))
            wait = passed  # as long again

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def duration(seconds: float) -> str:
    """Return a time in words: "40 s", "5 min", "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


class TimeLeft:
    """Estimate of the time left, by the steps since this object was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: int | None = None

    def after(self, done: int, steps: int) -> float:
        """Return the seconds that are left.

        Args:
            done: number of steps that are done; a resumed run does not begin at 1.
            steps: number of all steps.
        """
        if self._first is None:
            self._first = done - 1
        elapsed = time.monotonic() - self._start
        return elapsed / max(1, done - self._first) * (steps - done)


@contextmanager
def bar(work: str, steps: int, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Show in this context how far some work is, and the time left.

    Args:
        work: what is done, in front of the bar.
        steps: number of steps.
        shown: None shows it where somebody works with Python by hand: in a notebook, or at a prompt
            in a terminal. Scripts, tests and pipes print nothing then, and neither does work that
            is a step of other work with a bar, whether that one is shown or not.

    Yields:
        A function of the number of steps that are done.
    """
    notebook = "ipykernel" in sys.modules
    if shown is None:
        # Python and IPython set this where they have a prompt
        by_hand = hasattr(sys, "ps1") and (notebook or sys.stderr.isatty())
        shown = by_hand and not _inside.get()
    before = _inside.set(True)
    try:
        if not shown:
            yield lambda done: None
        elif notebook:
            yield _in_notebook(work, steps)
        else:
            with _in_terminal(work, steps) as advance:
                yield advance
    finally:
        _inside.reset(before)


@contextmanager
def _in_terminal(work: str, steps: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    clock = TimeLeft()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(work, total=steps, left="")

        def advance(done: int) -> None:
            progress.update(task, completed=done, left=_left(clock, done, steps))

        yield advance


def _in_notebook(work: str, steps: int) -> Callable[[int], None]:
    """Show a bar below the cell of a notebook, which needs no widgets."""
    from IPython.display import display

    clock = TimeLeft()
    handle: Any = None

    def advance(done: int) -> None:
        nonlocal handle
        text = f"{work} {done}/{steps} {_left(clock, done, steps)}"
        element = f'<progress value="{done}" max="{steps}"></progress>'
        shown = {"text/plain": text, "text/html": f"{element} {text}"}
        if handle is None:
            handle = display(shown, raw=True, display_id=True)
        else:
            handle.update(shown, raw=True)

    return advance


def _left(clock: TimeLeft, done: int, steps: int) -> str:
    """Return the time left in words; empty at the end."""
    seconds = clock.after(done, steps)
    return f"{duration(seconds)} left" if done < steps else ""
