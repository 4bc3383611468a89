"""Fitted protocols and transcripts of folders, whatever their protocol is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster.app.registry import protocol_class
from securecluster.app.run_folder import CONFIG, compared
from securecluster.errors import UsageError
from securecluster.messaging.transcript import Transcript
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.fitted import recorded_transcript
from securecluster.protocols.common.serialization import FittedSummary, read_kept


def load(folder: Path | str, model: Any = None, **objects: Any) -> ClusteringProtocol:
    """Return the fitted protocol of a folder, of whatever class it is.

    Args:
        folder: one that `save` wrote, or that of a finished run, which also gives `transcript_`.
        model: the module, where the run trained one of your own.
        objects: other hyper-parameters that were objects of your own, by name.

    Raises:
        RunFolderError: the folder holds no fitted protocol, or a damaged one.
        UsageError: a folder of several runs, an unknown protocol, or another module.
    """
    target = Path(folder)
    summary = _summary(target)
    fitted: ClusteringProtocol = protocol_class(summary.protocol).load(target, model, **objects)
    return fitted


def transcript_of(folder: Path) -> Transcript:
    """Return the transcript of a finished run's folder.

    Args:
        folder: of the run.

    Raises:
        RunFolderError: no finished run's folder, or a damaged one.
        UsageError: a folder of several runs, or of an unknown protocol, or one that `save` wrote.
    """
    summary = _summary(folder)
    # Objects of the user's own, which the folder does not contain, change no class of messages.
    params = {}
    for name, value in summary.params.items():
        if not isinstance(value, dict):
            params[name] = value
    protocol: ClusteringProtocol = protocol_class(summary.protocol)(**params)
    transcript = recorded_transcript(protocol, folder, summary)
    if transcript is None:
        raise UsageError(
            f"{folder} was written by save, which keeps no transcript: give the folder of the run"
        )
    return transcript


def _summary(folder: Path) -> FittedSummary:
    """Return the published part of the one result in a folder."""
    if (folder / CONFIG).is_file():
        names = compared(folder)
        if names is not None:
            raise UsageError(
                f"{folder} holds several runs: give the folder of one, such as {folder / names[0]}"
            )
    return read_kept(folder).learned
