"""Replay of a run in a new process, which never met the federation."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from securecluster.core.serialization import pack
from securecluster.errors import SecureClusterError
from securecluster.messaging.transcript import Transcript
from securecluster.parties import server_half
from securecluster.parties.derived import call_types
from securecluster.protocols.conformance.module_variables import author_modules, changed, variables
from securecluster.protocols.conformance.report import ConformanceError, NotApplicableError, told
from securecluster.protocols.conformance.runs import Example
from securecluster.protocols.conformance.simulation import FULL

ADVICE = (
    "run_server and what it calls may use the messages, the configuration and the hyper-parameters "
    "alone, and no federation, no variable of a module and nothing that config kept on self"
)
KEPT = (
    "what clients keep there is shared by all clients of a process, is in no checkpoint, and "
    "reaches replies without a release: keep it in a ClientTensor"
)
SECONDS = 300


def check_in_new_process(run: Example, folder: Path) -> None:
    """Check that a new process, which has the messages alone, ends in the same state.

    Nor may variables of the author's modules, or of their classes, be others than in a new process.

    Args:
        run: that is done again in a folder.
        folder: empty.

    Raises:
        NotApplicableError: the class cannot be imported, or a hyper-parameter is an object.
    """
    made = run.make()
    protocol_class = type(made)
    if not _importable(protocol_class):
        raise NotApplicableError(
            f"{protocol_class.__qualname__} cannot be imported in another process: define it "
            "at the top of a module"
        )
    params = _as_json(made.get_params())
    fitted = made.fit(run.federation, FULL, folder=folder / "run")
    (folder / "state").write_bytes(fitted.server_state_)
    job = {
        "path": sys.path,
        "module": protocol_class.__module__,
        "name": protocol_class.__qualname__,
        "params": params,
        "config": fitted.kept_.learned.config,
        "folder": str(folder),
        "modules": author_modules(made),
    }
    # one call: a function of the base package that replays in a new process can take its place
    problem, imported = _replay_elsewhere(job)
    if problem:
        raise ConformanceError(f"in a new process the server alone {problem}: {ADVICE}")
    names = changed(imported, variables(job["modules"]))
    if names:
        raise ConformanceError(
            f"a run changes {', '.join(names)}, which a new process has otherwise: {KEPT}"
        )


def _importable(protocol_class: type) -> bool:
    """Return whether another process finds a class by its module and name."""
    if protocol_class.__module__ == "__main__" or "." in protocol_class.__qualname__:
        return False
    try:
        module = importlib.import_module(protocol_class.__module__)
    except ImportError:
        return False
    return getattr(module, protocol_class.__qualname__, None) is protocol_class


def _as_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as JSON holds them.

    Raises:
        NotApplicableError: one of them is an object.
    """
    try:
        decoded: dict[str, Any] = json.loads(json.dumps(dict(params)))
    except TypeError:
        raise NotApplicableError(
            "a hyper-parameter is an object, which another process does not have"
        ) from None
    return decoded


def _replay_elsewhere(job: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return what went wrong in a replay in a new process, empty if nothing did, and the digests
    of variables before it.
    """
    code = (
        "import json, sys; job = json.loads(sys.stdin.read()); sys.path[:] = job['path']; "
        "from securecluster.protocols.conformance.fresh_process import replayed; "
        "print(json.dumps(replayed(job)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        return f"ended with {last[0]}", {}
    problem, imported = json.loads(done.stdout.strip().splitlines()[-1])
    return problem, imported


def replayed(job: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Replay a run in this process.

    Args:
        job: class, hyper-parameters, configuration, modules and folder of the run.

    Returns:
        What went wrong, empty if nothing did, and the digests of the modules' variables before it.
    """
    module = importlib.import_module(job["module"])
    for name in job["modules"]:
        importlib.import_module(name)
    imported = variables(job["modules"])
    return _replayed(job, module), imported


def _replayed(job: Mapping[str, Any], module: Any) -> str:
    """Return what went wrong in the replay of a run; empty if nothing did."""
    protocol_class = getattr(module, job["name"])
    folder = Path(job["folder"])
    try:
        made = protocol_class(**_with_tuples(protocol_class, job["params"]))
        frames = folder / "run" / "transcript"
        transcript = Transcript.read("full", frames, partial(call_types, made))
        state, _ = server_half.replayed(made, transcript, job["config"])
    except SecureClusterError as error:
        return f"makes another run ({told(error)})"
    except Exception as error:
        return f"ends with {told(error, [Path(module.__file__ or '')])}"
    if pack(state) != (folder / "state").read_bytes():
        return "ends in another state"
    return ""


def _with_tuples(protocol_class: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with tuples where the class's default is one, which JSON lacks."""
    converted = dict(params)
    for name, value in converted.items():
        default = getattr(protocol_class, name, None)
        if isinstance(default, tuple) and isinstance(value, list):
            converted[name] = tuple(value)
    return converted
