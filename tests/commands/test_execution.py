"""What a run prints while it is carried out."""

from __future__ import annotations

import io
import logging

from rich.console import Console

from securecluster.commands.execution import slow_work_on
from securecluster.core.progress import logger


def test_work_within_a_round_is_told_on_the_console_of_the_run_and_of_no_other() -> None:
    printed, quiet = io.StringIO(), io.StringIO()
    level = logger.level
    with slow_work_on(Console(file=printed)), slow_work_on(Console(file=quiet, quiet=True)):
        logger.info("draw %d of [bold]%d", 3, 9)
    logger.info("no run goes on")
    assert printed.getvalue() == "draw 3 of [bold]9\n"
    assert quiet.getvalue() == ""
    assert logger.level == level == logging.NOTSET
    assert logger.handlers == []
