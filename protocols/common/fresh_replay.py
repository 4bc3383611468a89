"""Replay of a run in a new process, which finds what a server keeps outside its messages.

A replay on an object of the same process cannot tell a module's variable that clients filled from a
message. In a new process nobody has filled it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack
from securecluster.errors import ReplayError, SecureClusterError
from securecluster.messaging.transcript import Transcript
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime import run_secret

TASK = "task"
STATE = "state"
FAULT = "fault"
FRAMES = "transcript"


@dataclass(frozen=True)
class _Task:
    """What the new process needs beside the transcript."""

    protocol: type[ClusteringProtocol]
    params: dict[str, Any]
    config: dict[str, Any]
    names: tuple[str, ...]
    threads: int
    device: str
    secret: bytes | None  # None where everything follows from the seed


def replay_in_new_process(fitted: ClusteringProtocol) -> str | None:
    """Replay a run in a new process, against its transcript alone.

    Args:
        fitted: the protocol after a run with a full transcript.

    Returns:
        Why no new process can run the server's half: its class, or an object among its
        hyper-parameters, cannot be imported there. None after the replay.

    Raises:
        ReplayError: the server's half fails, or ends in another state.
    """
    made = fitted.with_fitted_params()
    name = type(made).__name__
    learned = made.kept_.learned
    task = _Task(
        type(made),
        made.get_params(),
        learned.config,
        tuple(learned.names),
        learned.settings.threads,
        learned.settings.device,
        None if learned.settings.keys_from_seed else made.kept_.secret,
    )
    if type(made).__module__ == "__main__":
        return f"{name} is defined in a script: move it to a module"
    try:
        packed = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"{name} cannot be sent to a new process: {error}"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / TASK).write_bytes(packed)
        _write(made, work / FRAMES)
        # the same modules as here, wherever they come from
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-m", __name__, folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        fault = _text(work / FAULT)
        if fault:
            raise ReplayError(
                f"the server's half of {name} fails in a new process ({fault}): it used something "
                "that no message contained, such as a variable that clients fill"
            )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            return f"{name} cannot be loaded in a new process: {lines[-1]}"
        if (work / STATE).read_bytes() != made.kept_.server:
            raise ReplayError(
                f"the final state of {name}'s server differs in a new process: it used something "
                "that no message contained, such as a variable that clients fill"
            )
    return None


def _write(fitted: ClusteringProtocol, folder: Path) -> None:
    """Write the transcript of a run to a folder.

    Args:
        fitted: the protocol after the run.
        folder: created.
    """
    folder.mkdir()
    written = Transcript("full", folder, fitted.message_types, fitted.transcript_.names)
    for position in range(len(fitted.transcript_.entries)):
        written.record(*fitted.transcript_.content(position))


def _text(path: Path) -> str:
    """Return the text of a file; "" where there is none."""
    if not path.is_file():
        return ""
    return path.read_text()


def main(folder: Path) -> None:
    """Run the server's half in this process, and write its final state, or why it fails.

    Args:
        folder: with the task and the transcript.
    """
    task: _Task = pickle.loads((folder / TASK).read_bytes())
    protocol = task.protocol(**task.params)
    secrets = Randomness(task.config["seed"])
    if task.secret is not None:
        secrets = run_secret.randomness(task.secret)
    transcript = Transcript.read("full", folder / FRAMES, protocol.message_types, task.names)
    try:
        state, _ = protocol.replayed(
            transcript, task.config, task.threads, task.device, secrets=secrets
        )
    except SecureClusterError as error:
        (folder / FAULT).write_text(str(error))
        return
    # the mistake may raise anything
    except Exception as error:
        (folder / FAULT).write_text(f"{type(error).__name__}: {error}")
        return
    (folder / STATE).write_bytes(pack(state))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
