"""What is in a folder, whatever its protocol is: fitted protocols, transcripts and plans of runs.

Only here, above all protocols, does a name in a file stand for a class.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster import __version__
from securecluster.core import serialization
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UsageError, unknown
from securecluster.folders import run_folder
from securecluster.folders.run_folder import CONFIG, RunPlan, check_options
from securecluster.folders.schemas import RunConfig
from securecluster.models.architectures import AUTO
from securecluster.models.architectures import names as architectures
from securecluster.parties.derived import as_agreed, goes_on
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.registry import class_of_folder, protocol_names
from securecluster.recordings.recording_folder import Recording, is_recording
from securecluster.results.fitted import recorded_transcript
from securecluster.results.fitted_state import FittedSummary
from securecluster.results.saving import read_kept
from securecluster.results.start_models import with_start
from securecluster.runtime.settings import Settings, check_values

if TYPE_CHECKING:
    from securecluster.messaging.transcript import Transcript


def load(folder: Path | str, model: Any = None, **objects: Any) -> ClusteringProtocol:
    """Return the fitted protocol of a folder, of whatever class it is.

    Args:
        folder: one that `save` wrote, or that of a finished run, which also gives `transcript_`.
        model: the module, where the run trained one of your own.
        objects: other hyper-parameters that were objects of your own, by name.

    Raises:
        RunFolderError: the folder holds no fitted protocol, or a damaged one.
        UsageError: a folder of several runs, an unknown protocol, or another module; or the
            recording of an app, which has no protocol.
    """
    target = Path(folder)
    if is_recording(target):
        raise UsageError(
            f"{target} is the recording of an app, and holds no fitted protocol: use "
            "open_transcript or audit_recording"
        )
    summary = _summary(target)
    fitted: ClusteringProtocol = class_of_folder(summary.protocol).load(target, model, **objects)
    return fitted


def open_transcript(folder: Path | str) -> Transcript:
    """Return the transcript of a finished run's folder, or of an app's recording.

    It takes a run of a protocol of this project, or of an installed package's. For others, load the
    protocol: `MyProtocol.load(folder).transcript_`.

    Args:
        folder: of the run.

    Raises:
        RunFolderError: no finished run's folder, or a damaged one.
        UsageError: a folder of several runs, or of an unknown protocol, or one that `save` wrote.
    """
    folder = Path(folder)
    if is_recording(folder):
        return Recording.read(folder).transcript
    summary = _summary(folder)
    # Objects of the user's own, which the folder does not contain, change no class of messages.
    params = {}
    for name, value in summary.params.items():
        if not isinstance(value, dict):
            params[name] = value
    params.pop("start", None)
    protocol: ClusteringProtocol = class_of_folder(summary.protocol)(**params)
    transcript = recorded_transcript(protocol, folder, summary)
    if transcript is None:
        raise UsageError(
            f"{folder} was written by save, which keeps no transcript: give the folder of the run"
        )
    return transcript


def _summary(folder: Path) -> FittedSummary:
    """Return the summary of the one result in a folder."""
    if (folder / CONFIG).is_file():
        names = compared(folder)
        if names is not None:
            raise UsageError(
                f"{folder} holds several runs: give the folder of one, such as {folder / names[0]}"
            )
    return read_kept(folder).learned


def compared(folder: Path) -> list[str] | None:
    """Return the protocols that a folder compares; None where it contains a single run.

    Args:
        folder: of a run or a comparison.

    Raises:
        RunFolderError: no run folder, a damaged one, or one that compares something else.
    """
    names = run_folder.compared(folder)
    known_names = protocol_names()
    for position, name in enumerate(names or ()):
        if name.partition(":")[0] not in known_names:
            serialization.refuse(folder / CONFIG, f"compare[{position}] is no protocol")
    return names


def compared_runs(folder: Path) -> list[Path] | None:
    """Return the folders of the runs that a folder compares; None where it contains a single run.

    Args:
        folder: of a run or a comparison.

    Raises:
        RunFolderError: no run folder, a damaged one, or a link in place of a run.
    """
    names = compared(folder)
    if names is None:
        return None
    runs = [folder / name for name in names]
    for run in runs:
        if run.is_symlink():
            raise RunFolderError(f"{run} is a link, which no comparison makes: remove the link")
    return runs


def run_config(folder: Path) -> RunConfig:
    """Return the content of a run's config.json, with the types that a run writes.

    Args:
        folder: of a run of a protocol that has a name here.

    Raises:
        RunFolderError: no run folder, or a config.json that no run wrote.
        UsageError: the folder contains a sweep.
    """
    config = run_folder.run_config(folder)
    options = protocol_type(folder, config)
    if config["version"] != __version__:
        # an option that came later has its default, by which the protocol is what it was before
        config["protocol"] = {**run_folder.defaults_of(options), **config["protocol"]}
    params = with_start(folder / CONFIG, config["protocol"])
    params.pop("name", None)
    check_options(folder / CONFIG, "protocol", params, options)
    return config


def protocol_type(folder: Path, config: RunConfig) -> Any:
    """Return the class of a run's protocol.

    Args:
        folder: of the run.
        config: content of its config.json.

    Raises:
        RunFolderError: config.json names none.
    """
    path = folder / CONFIG
    name = config["protocol"].get("name")
    serialization.refuse(path, serialization.fault_of(name, str, "protocol.name"))
    try:
        return class_of_folder(str(name))
    except UsageError as error:
        raise RunFolderError(f"{path} names no protocol that can be run here: {error}") from None


def plan_of(folder: Path) -> tuple[RunPlan, RunConfig]:
    """Return the plan of a run folder, and the content of its config.json.

    Args:
        folder: of a run.

    Raises:
        RunFolderError: no such folder, or not one this version can read.
        UsageError: the folder contains a sweep, or a run with objects of the user's own, which no
            folder contains.
    """
    config = run_config(folder)
    params = with_start(folder / CONFIG, config["protocol"])
    # config.json has a description in place of an object, such as a network
    names = [name for name, value in params.items() if isinstance(value, dict)]
    if names:
        objects = ", ".join(sorted(names))
        raise UsageError(
            f"{folder} was run with objects of your own ({objects}), which it does not hold: go "
            "on, load or replay it from Python, with these objects"
        )
    del params["name"]
    protocol = protocol_type(folder, config)(**params)
    simulation = None
    if config["simulation"] is not None:
        simulation = Simulation(**config["simulation"])
    settings = Settings(**config["settings"])
    try:
        check_values(settings)
        protocol = goes_on(as_agreed(protocol, config["network"]), config["network"])
        protocol.check(len(config["clients"]))
        if protocol.model not in (AUTO, *architectures()):
            raise unknown("model", protocol.model, (AUTO, *architectures()))
    except UsageError as error:
        raise not_written(folder, error) from None
    return RunPlan(protocol, simulation, settings), config


def not_written(folder: Path, error: UsageError) -> RunFolderError:
    """Return the error of a config.json with an option that no run has.

    Args:
        folder: of the run.
        error: the refusal of the option.
    """
    return RunFolderError(
        f"{folder / CONFIG} is not what a run of this version writes there: {error}"
    )
