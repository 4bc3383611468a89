"""What an agent answered, a line of JSON each, for its owner's collectors of logs.

Security rule: an event has the kind of a message, the code of a refusal, the method and round of a
run, lengths and times. No text of an error and nothing that a message contains is in it, so none of
the owner's data. Lines are appended one by one to a file that is opened anew each time, so that it
may be moved away while the agent serves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import structured
from securecluster.errors import RunFolderError
from securecluster.messaging import wire

FILE = "events.jsonl"
OK = "ok"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answered:
    """One message that an agent answered.

    Args:
        time: at which it was answered, in UTC.
        kind: of the message, or "unknown".
        outcome: "ok", or the code of a refusal.
        received: bytes of the message.
        sent: bytes of the answer.
        seconds: that the answer took.
        run: fingerprint, of a frame's answer.
        method: of a frame's answer.
        round: of a frame's answer.
    """

    time: str
    kind: str
    outcome: str
    received: int
    sent: int
    seconds: float
    run: str = ""
    method: str = ""
    round: int = 0

    @classmethod
    def of(cls, kind: str, status: str, received: int, reply: bytes, seconds: float) -> Answered:
        """Return the event of an answer.

        Args:
            kind: of the message.
            status: of the answer.
            received: bytes of the message.
            reply: data of the answer; of a frame it is a frame.
            seconds: that it took.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = cls(now, kind, status, received, len(reply), round(seconds, 3))
        if kind != "frame" or status != OK:
            return event
        header, code = wire.outcome(reply)
        told = {"run": header.config, "method": header.method, "round": header.round}
        return cls(**{**asdict(event), **told, "outcome": code or OK})


Listener = Callable[[Answered], None]


def to_file(folder: Path) -> Listener:
    """Return a listener that appends each event to a file of a node's folder, as a line of JSON."""

    def append(event: Answered) -> None:
        try:
            line = json.dumps(asdict(event))
            atomic_files.append_line(folder / FILE, line, atomic_files.OWNER)
        except RunFolderError as error:  # such as of a full disk, which stops no answer
            logger.warning("%s", error)

    return append


def read(folder: Path) -> list[Answered]:
    """Return the events in the file of a node's folder, which may have been moved away.

    Raises:
        RunFolderError: it does not parse.
    """
    path = folder / FILE
    if not path.exists():
        return []
    return manifest.read_lines(
        path, atomic_files.read(path), lambda line: structured(json.loads(line), Answered)
    )
