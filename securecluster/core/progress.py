"""Progress of work within a round that may take long, for whoever prints a run's lines.

It goes by logging, to which only the app attaches a printer: a mechanism neither prints nor knows
the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# its records of level INFO are lines for the user
logger = logging.getLogger("securecluster.progress")
EVERY_S = 3.0  # seconds from one line to the next


def told_while_slow(work: str) -> Callable[[int, int], None]:
    """Return a function that is called after each step, and logs a line every `EVERY_S` seconds.

    Work that takes less says nothing.

    Args:
        work: what is done, the beginning of each line.

    Returns:
        A function of the number of steps that are done, and that of all steps.
    """
    last = time.monotonic()

    def watch(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY_S:
            return
        last = now
        logger.info("%s %d of %d", work, done, total)

    return watch
