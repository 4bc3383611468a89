"""Honesty by replay: the server's code against a recorded transcript, with no client in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster import files
from securecluster.app.folder import Plan
from securecluster.errors import ReplayError, RunFolderError
from securecluster.transcript import Transcript, load_entries


def replay(plan: Plan, config: dict[str, Any], folder: Path) -> int:
    """Replay a finished run folder; returns the number of calls.

    Raises:
        ReplayError: the server asks for something else, or ends elsewhere, than it did in the run.
    """
    if plan.settings.transcript != "full" or not (folder / "server.safetensors").is_file():
        raise RunFolderError(f"{folder} cannot be replayed: that takes a finished run with --transcript full")
    transcript = Transcript("full", folder / "transcript", plan.protocol.message_types)
    transcript.entries = load_entries(folder / "transcript")
    state = plan.protocol.replay(transcript, config["network"], plan.settings.threads, plan.settings.device)
    if state != files.read(folder / "server.safetensors"):
        raise ReplayError(f"{folder}: the server's final state differs from the recorded one: it used something that no message brought it")
    return len(transcript.entries)
