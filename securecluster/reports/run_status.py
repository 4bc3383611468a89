"""Where a run stands, by its folder and while it is under way: rounds, clients, ε, bytes.

Nothing of clients' data: names, numbers of rounds, codes of refusals and what the ledger says.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import structured, unpack
from securecluster.errors import RunFolderError
from securecluster.folders import run_folder
from securecluster.folders.schemas import Result
from securecluster.messaging.messages import AUTHORITY_CALL, RELAY
from securecluster.messaging.transcript import Entry, load_entries
from securecluster.privacy.dp.ledger import Event
from securecluster.reports import finished_run
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.run import checkpoints

UNDER_WAY, STOPPED, ENDED = "under way", "not ended, and nobody goes on with it", "ended"


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands.

    Args:
        protocol: its name.
        state: in words.
        round: the last one that ended; 0 before the first.
        rounds: of the whole run.
        answered: clients that replied in every call of the last round with calls; None where the
            run keeps no transcript.
        silent: codes of refusals, or "no reply", by the name of each other client that was asked.
        epsilon: of what was released so far; None is infinite.
        known: whether `epsilon` could be computed; DP-SGD has none before the first checkpoint.
        left: of the run's target; None without a target.
        up: bytes from clients.
        down: bytes to clients.
        refusal: client, code and round of the last refusal; None without any.
    """

    protocol: str
    state: str
    round: int
    rounds: int
    answered: list[str] | None
    silent: dict[str, str]
    epsilon: float | None
    known: bool
    left: float | None
    up: int
    down: int
    refusal: tuple[str, str, int] | None

    @classmethod
    def of(cls, folder: Path) -> RunStatus:
        """Return the status of the run in a folder.

        Raises:
            RunFolderError: no run folder, or a damaged one.
            UsageError: a comparison or a sweep.
        """
        config = run_folder.run_config(folder)
        method = finished_run.protocol_of(folder, config)
        path = folder / "history.jsonl"
        lines: list[dict[str, Any]] = _lines(path, json.loads)
        last = lines[-1] if lines else {"round": 0, "up": 0, "down": 0}
        names = config["clients"]
        entries = load_entries(folder / run_folder.TRANSCRIPT)
        answered, silent = _of_last_round(entries, names)
        result = run_folder.result_of(folder) if run_folder.finished(folder) else None
        sent: Any = result["bytes"] if result else last  # beside rounds there are calls at the end
        epsilon = _of_result(result) if result else _so_far(folder, config["network"]["delta"])
        target = method.privacy.target_epsilon
        return cls(
            protocol=method.name,
            state=_state(folder, result),
            round=last["round"],
            rounds=int(method.total_rounds),
            answered=answered if entries else None,
            silent=silent,
            epsilon=None if epsilon is None or math.isinf(epsilon) else epsilon,
            known=epsilon is not None,
            left=None if target is None or epsilon is None else max(0.0, target - epsilon),
            up=sent["up"],
            down=sent["down"],
            refusal=_last_refusal(entries, names),
        )


def _lines(path: Path, decode: Any) -> list[Any]:
    """Return the lines of a log that may not be there yet, and may be written meanwhile."""
    data = atomic_files.read(path) if path.is_file() else b""
    return manifest.read_lines(path, data, decode)


def _state(folder: Path, result: Result | None) -> str:
    """Return in words whether a run goes on."""
    if result is not None:
        stopped = result.get("stopped")
        return f"{ENDED}, stopped by {stopped['reason']}" if stopped else ENDED
    return UNDER_WAY if run_folder.is_being_written(folder) else STOPPED


def _name(names: list[str], client: int) -> str:
    """Return the name of a client; newcomers have numbers."""
    return names[client] if client < len(names) else str(client)


def _of_last_round(entries: list[Entry], names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return who replied in the last round with calls to clients, and why others did not."""
    calls = [entry for entry in entries if entry.verb not in (RELAY, AUTHORITY_CALL)]
    calls = [entry for entry in calls if entry.round == calls[-1].round]
    asked = dict.fromkeys(client for entry in calls for client in entry.to)
    silent = {client: "no reply" for entry in calls for client in entry.lost}
    silent |= dict(pair for entry in calls for pair in entry.refused)
    replied = [_name(names, client) for client in asked if client not in silent]
    return replied, {_name(names, client): code for client, code in silent.items()}


def _last_refusal(entries: list[Entry], names: list[str]) -> tuple[str, str, int] | None:
    """Return client, code and round of the last refusal."""
    for entry in reversed(entries):
        if entry.refused:
            client, code = entry.refused[-1]
            return _name(names, client), code, entry.round
    return None


def _of_result(result: Result) -> float:
    """Return ε of a run that has ended."""
    epsilon = result["privacy"]["epsilon"]
    return math.inf if epsilon is None else epsilon


def _so_far(folder: Path, delta: float) -> float | None:
    """Return ε of what was released so far; None where its price is not known yet."""
    events: list[Event] = _lines(
        folder / "ledger.jsonl", lambda line: structured(json.loads(line), Event)
    )
    if not events:
        return 0.0
    for _ in range(2):  # a checkpoint may be replaced by the next one meanwhile
        for checkpoint in checkpoints(folder)[-1:]:
            try:
                data = manifest.checked(checkpoint, "network", manifest.read(checkpoint))
            except RunFolderError:
                continue
            ledger = unpack(data, ChannelState).ledger
            return dataclasses.replace(ledger, events=events).price(delta).epsilon
    return None
