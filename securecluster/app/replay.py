"""Replay of a run: the server alone against the transcript, with no client in the process."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.app import privacy_report
from securecluster.app.run_folder import CONFIG, RESULT, TRANSCRIPT, RunPlan, finished, result_of
from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import pack, structured
from securecluster.errors import ReplayError, RunFolderError
from securecluster.messaging.transcript import Transcript, entry_of
from securecluster.privacy.dp.ledger import Event, Release
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.serialization import read_kept


@dataclass(frozen=True)
class Replayed:
    """Counts of a replay.

    Args:
        calls: how many calls it made again.
        unused: releases of single clients that the ledger has beside those, to a server that was
            killed before it used them. They are priced.
    """

    calls: int
    unused: int


def replay(plan: RunPlan, config: dict[str, Any], folder: Path) -> Replayed:
    """Replay a finished run folder.

    Every file must be what the run wrote; the index must say what the frames are; the server must
    make the same requests and end in the same state; and the result's labels, bytes and privacy
    must follow from these. Metrics and the history are the observer's, and cannot be replayed. The
    ledger must have every release of these calls. It may have more, which went to a server that was
    killed and have no frames any more.

    Raises:
        ReplayError: the server asks for something else, or ends elsewhere, than it did in the run.
        RunFolderError: the folder cannot be replayed, or a file is missing or damaged.
    """
    if plan.settings.transcript != "full" or not finished(folder):
        raise RunFolderError(
            f"{folder} cannot be replayed: that takes a finished run with --transcript full"
        )
    result = result_of(folder)
    kept = read_kept(folder)
    settings = plan.settings
    agreed = kept.learned.config
    if agreed != config["network"]:
        raise ReplayError(
            f"{folder / CONFIG} differs from the configuration that clients and server agreed on"
        )
    transcript = Transcript.open(
        settings.transcript, folder / TRANSCRIPT, plan.protocol.message_types, config["clients"]
    )
    _check_index(folder / TRANSCRIPT, transcript)
    state, network = plan.protocol.replayed(transcript, agreed, settings.threads, settings.device)
    if pack(state) != kept.server:
        raise ReplayError(
            f"{folder}: the server's final state differs from the recorded one: it used something "
            "that no message brought it"
        )
    ledger_file = folder / "ledger.jsonl"
    recorded = _recorded_events(ledger_file)
    unused = _check_ledger(ledger_file, recorded, network.ledger.events)
    network.ledger.events = recorded
    # these are public, and no message brings them
    network.ledger.samples = kept.learned.network.ledger.samples
    network.ledger.names = kept.learned.network.ledger.names
    fitted = plan.protocol.restore_from(folder)
    fitted.ledger_ = network.ledger
    _check_result(folder / RESULT, result, fitted, state, transcript)
    return Replayed(transcript.count, unused)


def _check_index(folder: Path, transcript: Transcript) -> None:
    """Raise where the index and the frames differ, or frames lie there that it does not list."""
    for path in transcript.surplus():
        raise RunFolderError(
            f"{path} belongs to no call that the index lists: one of the two is not the run's"
        )
    for position, entry in enumerate(transcript.entries):
        if entry_of(*transcript.content(position)) != entry:
            raise ReplayError(
                f"line {position + 1} of {folder / 'index.jsonl'} differs from the frames of that "
                "call"
            )


def _recorded_events(path: Path) -> list[Event]:
    """Return the events of a ledger's file.

    Raises:
        RunFolderError: it does not parse.
    """
    data = atomic_files.read(path) if path.is_file() else b""
    return manifest.read_lines(path, data, lambda line: structured(json.loads(line), Event))


def _check_ledger(path: Path, recorded: list[Event], replayed: list[Event]) -> int:
    """Return how many releases a ledger's file has beside those of the replay.

    Raises:
        ReplayError: it lacks a release, or says anything else of it.
    """
    if recorded == replayed:
        return 0
    counts: Counter[Release] = Counter()
    for event in recorded:
        counts.update(event.releases())
    for event in replayed:
        counts.subtract(event.releases())
    if any(count < 0 for count in counts.values()):
        raise ReplayError(f"{path} differs from the replay")
    return counts.total()


def _check_result(
    path: Path,
    result: dict[str, Any],
    fitted: ClusteringProtocol,
    state: Any,
    transcript: Transcript,
) -> None:
    """Raise where result.json has other labels, bytes or privacy than follow from the replay."""
    labels = [int(label) for label in state.labels]
    names = list(fitted.kept_.learned.names)
    replayed = {
        "protocol": fitted.name,
        "names": names,
        "clients": len(names),
        "labels": labels,
        "clusters": len(set(labels)),
        "seed": fitted.kept_.learned.config["seed"],
        "bytes": transcript.totals(),
        "privacy": json.loads(json.dumps(privacy_report.section(fitted))),
    }
    for name, value in replayed.items():
        if result.get(name) != value:
            raise ReplayError(f"{path} differs from the replay in its {name}")
