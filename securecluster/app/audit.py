"""Replays a run: the server's code alone against the recorded transcript, with no client in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster.app.folder import TRANSCRIPT, Plan, finished, result_of
from securecluster.errors import ReplayError, RunFolderError
from securecluster.network import NetworkState
from securecluster.protocols.saving import read_kept
from securecluster.state import pack
from securecluster.transcript import Transcript, entry_of


def replay(plan: Plan, config: dict[str, Any], folder: Path) -> int:
    """Replay a finished run folder.

    Every file must be what the run wrote; the index must say what the frames are; the server must make the same
    requests and end in the same state; and the result's labels, bytes and epsilon must follow from these.

    Returns:
        The number of calls.

    Raises:
        ReplayError: the server asks for something else, or ends elsewhere, than it did in the run.
        RunFolderError: the folder cannot be replayed, or a file is missing or damaged.
    """
    if plan.settings.transcript != "full" or not finished(folder):
        raise RunFolderError(f"{folder} cannot be replayed: that takes a finished run with --transcript full")
    result, kept = result_of(folder), read_kept(folder)
    names = config["clients"]
    transcript = Transcript.open(folder / TRANSCRIPT, plan.protocol.message_types, names)
    _check_index(folder / TRANSCRIPT, transcript)
    settings = plan.settings
    state, network = plan.protocol.replayed(transcript, config["network"], settings.threads, settings.device)
    if pack(state) != kept.server:
        raise ReplayError(f"{folder}: the server's final state differs from the recorded one: it used something that no message brought it")
    network.ledger.samples = kept.learned.network.ledger.samples  # public, and not told by any message
    _check_result(folder, result, state.labels, transcript, network, config["network"]["delta"])
    return transcript.count


def _check_index(folder: Path, transcript: Transcript) -> None:
    """Raise where the index says anything else than the frames, or frames lie there that it does not list."""
    for path in transcript.surplus():
        raise RunFolderError(f"{path} belongs to no call of the run: remove it")
    for position, entry in enumerate(transcript.entries):
        if entry_of(*transcript.content(position)) != entry:
            raise ReplayError(f"line {position + 1} of {folder / 'index.jsonl'} differs from the frames of that call")


def _check_result(
    folder: Path,
    result: dict[str, Any],
    labels: list[int],
    transcript: Transcript,
    network: NetworkState,
    delta: float,
) -> None:
    """Raise where result.json says anything else than the replay finds."""
    ledger = network.ledger
    found = {
        "labels": [int(label) for label in labels],
        "bytes": transcript.totals(),
        "epsilon": ledger.reported(delta),
        "released without noise": [f"{method}: {name}" for method, name in ledger.exact()],
    }
    told = {
        "labels": result["labels"],
        "bytes": result["bytes"],
        "epsilon": result["privacy"]["epsilon"],
        "released without noise": result["privacy"]["exact"],
    }
    for name, value in found.items():
        if told[name] != value:
            raise ReplayError(f"{folder / 'result.json'} differs from the replay in its {name}")
