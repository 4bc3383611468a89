"""The number of a run on many machines, which tells it from every other run.

The server draws it when a run begins, and it is part of what the parties agree on. So the run's
fingerprint, which is in every frame and in all that is signed, names this run: a second one of the
same configuration has other keys and another folder at each node, and adds to the node's ledger. A
server that goes on in the folder of a run has its number there.

Runs in one process have none: nobody outlives them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

NAME = "run"  # in the configuration
_FORM = re.compile(r"[0-9a-f]{32}")


def drawn() -> str:
    """Return a new number, 128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def of(config: Mapping[str, Any]) -> str | None:
    """Return the number of a run; None in one process, and in runs of earlier versions.

    Args:
        config: what the parties of the run agreed on.

    Raises:
        ValueError: what stands for it is no number.
    """
    number = config.get(NAME)
    if number is not None and not (isinstance(number, str) and _FORM.fullmatch(number)):
        raise ValueError("a run's number has 32 hexadecimal digits")
    return number
