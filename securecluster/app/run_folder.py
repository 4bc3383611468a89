"""Run folders: claimed by one process at a time, marked as ours, checked when they are read back.

Nothing but what a run wrote is ever removed: a folder without our marker, or with a file of
somebody else in it, is refused. Whoever writes holds a lock from before the first check until the
end; the operating system lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import securecluster
from securecluster.app.options import Simulation, protocol_class
from securecluster.core import atomic_files, manifest
from securecluster.data import Federation
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging.transcript import INDEX
from securecluster.protocols.common import newcomers
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.run import checkpoints, remove_checkpoints
from securecluster.runtime.settings import Settings

SCHEMA = 2
CONFIG, RESULT = "config.json", "result.json"
MARKER, LOCK = ".securecluster", ".lock"
TRANSCRIPT = "transcript"
COMPARISON = "compare.json"
PICTURES = (
    "accuracy.png", "perplexity.png", "position_error.png", "cost.png", "dendrogram.png",
    "graph.png", "relevance.png", "separation.png", "similarity.png", "similarity-pairs.png",
    "tree.png",
)  # fmt: skip
READ_BACK = {
    CONFIG, "history.jsonl", "ledger.jsonl", "clients.safetensors", "learned.safetensors",
    "models.safetensors", "server.safetensors", "start.safetensors",
}  # fmt: skip
WRITTEN = {*READ_BACK, *PICTURES, RESULT, manifest.NAME, MARKER, newcomers.NAME}
FRAMES = re.compile(rf"{re.escape(INDEX)}|\d+\.safetensors")
PART = re.compile(r"manifest\.json|clock|origin|clients|network|transcript|(phase|loop)-[\w-]+")


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Enough to repeat a run: what `config.json` holds.

    Args:
        simulation: how the clients are made; None for data that came from Python and are not ours
            to make again.
    """

    protocol: ClusteringProtocol
    simulation: Simulation | None
    settings: Settings

    def content(self, federation: Federation) -> dict[str, Any]:
        """Return the content of config.json."""
        simulation = None if self.simulation is None else dataclasses.asdict(self.simulation)
        content = {
            "schema": SCHEMA,
            "version": securecluster.__version__,
            "protocol": {"name": self.protocol.name, **self.protocol.shown_params()},
            "simulation": simulation,
            "settings": dataclasses.asdict(self.settings),
            "data_digest": federation.digest(),
            "clients": list(federation.names),
            "network": self.protocol.config(federation, self.settings.dtype),
        }
        # tuples become lists, as they are read back
        found: dict[str, Any] = json.loads(json.dumps(content))
        return found

    def as_json(self, federation: Federation) -> str:
        """Return the text of config.json."""
        return json.dumps(self.content(federation), indent=2) + "\n"


def _default_name(name: str) -> Path:
    """Return a new path under runs/."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def check_free(target: Path | None, force: bool) -> None:
    """Raise UsageError where a run cannot be put.

    That is a folder that is in use, or a path that is no folder.

    Args:
        target: where the run is to go; None is a new folder.
        force: whether the run in the folder, if there is one, is to be replaced.
    """
    if target is None or not used(target):
        return
    if not force:
        raise UsageError(
            f"{target} exists and is not empty: choose another --out, or --force to replace the "
            "run in it"
        )
    if not _is_marker(target / MARKER):
        raise UsageError(
            f"{target} is not a run folder, so --force will not delete it: choose another --out"
        )
    strange = foreign(target)
    if strange:
        raise UsageError(
            f"{target} holds {strange[0].relative_to(target)}, which the run in it did not write,"
            " so --force will not delete it: move it, or choose another --out"
        )


def used(target: Path) -> bool:
    """Return whether a folder holds more than what a start that was killed leaves.

    Raises:
        UsageError: it is no folder.
        RunFolderError: the operating system refuses the path.
    """
    with _refused(target):
        if target.is_symlink() and not target.exists():
            raise UsageError(f"{target} is a link to nothing: remove it, or choose another folder")
        if target.exists() and not target.is_dir():
            raise UsageError(f"{target} is not a folder: choose another one")
        if not target.is_dir():
            return False
        return not all(_is_bookkeeping(path) for path in target.iterdir())


def _is_bookkeeping(path: Path) -> bool:
    """Return whether a path is a lock, a marker or a half-written file of ours."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == LOCK or _is_marker(path):
        return True
    final_name = atomic_files.final_name(path.name)
    return final_name != path.name and final_name in WRITTEN


def _is_marker(path: Path) -> bool:
    """Return whether a file is a marker of a run folder, and not just called so."""
    if path.name != MARKER or path.is_symlink() or not path.is_file():
        return False
    return f'"{CONFIG}"'.encode() in atomic_files.read(path)


def foreign(folder: Path) -> list[Path]:
    """Return the paths in a run folder, or in the runs of a comparison, that no run wrote."""
    names = _names_compared(folder)
    written = WRITTEN | {LOCK}
    if names:
        written.add(COMPARISON)
    strange: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            strange.append(path)
        elif path.is_dir():
            strange += _foreign_below(path, names)
        elif atomic_files.final_name(path.name) not in written:
            strange.append(path)
    return strange


def _names_compared(folder: Path) -> list[str]:
    """Return the runs that a folder says it compares.

    There are none where it holds a single run, or is damaged.
    """
    try:
        return compared(folder) or []
    except RunFolderError:
        return []


def _foreign_below(folder: Path, runs: Collection[str]) -> list[Path]:
    """Return the paths in a folder within a run folder that neither it nor one of `runs` wrote."""
    if folder.name in runs and _is_marker(folder / MARKER):
        return foreign(folder)
    if folder.name == ".checkpoint.tmp" or re.fullmatch(r"checkpoint-\d{6,}", folder.name):
        names = PART
    elif folder.name == TRANSCRIPT:
        names = FRAMES
    else:
        return [folder]
    return [path for path in folder.iterdir() if not _is_file_called(path, names)]


def _is_file_called(path: Path, names: re.Pattern[str]) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    return names.fullmatch(atomic_files.final_name(path.name)) is not None


@contextmanager
def claimed(out: Path | None, force: bool, name: str, texts: Mapping[str, str]) -> Iterator[Path]:
    """Take a folder for a run, write its first files, and hold its lock.

    The lock comes before every check, so of two processes that start at once one is refused and
    neither loses anything. The folder itself is never renamed or removed: `.`, a mount point and a
    link to a folder will do.

    Args:
        out: where; None is a new folder `runs/NAME-TIME-PID`.
        force: replace the run in the folder.
        texts: by path in the folder; `config.json` is written last of each folder's.

    Raises:
        UsageError: the folder is in use, and `force` is not given or does not apply.
        RunFolderError: the disk says no, or another process writes there.
    """
    target = out or _default_name(name)
    check_free(target, force)
    with _refused(target):
        new = not target.exists()
    atomic_files.make_folder(target)
    with _locked(target):
        check_free(target, force)
        _replace(target)
        try:
            _write_texts(target, texts)
        except BaseException:
            _clear(target)
            if new:
                _remove_empty(target)
            raise
        yield target


def _replace(target: Path) -> None:
    """Remove the run, or the comparison and its runs, in a folder that holds nothing else.

    Raises:
        RunFolderError: another process writes to one of the runs, or the disk says no.
    """
    runs = [target / name for name in _names_compared(target) if (target / name).is_dir()]
    with ExitStack() as held:
        for run in runs:
            held.enter_context(_locked(run))
        for run in runs:
            _clear(run)
    for run in runs:  # their locks are free, and can be removed on every system
        _remove_empty(run)
    _clear(target)


def _clear(target: Path) -> None:
    """Remove what a run wrote, up to the lock.

    `config.json` goes first, so that what a kill leaves half-way is no run; the marker goes last,
    so that it can still be replaced.
    """
    try:
        (target / CONFIG).unlink(missing_ok=True)
        for path in target.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (LOCK, MARKER):
                path.unlink()
        (target / MARKER).unlink(missing_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunFolderError(
            f"cannot remove all of the run in {target} ({reason}): remove the rest by hand, or "
            "choose another folder"
        ) from error


def _remove_empty(target: Path) -> None:
    with suppress(OSError):
        (target / LOCK).unlink(missing_ok=True)
        target.rmdir()


def _write_texts(target: Path, texts: Mapping[str, str]) -> None:
    """Write configurations, and before each its folder's marker.

    The marker has the digest of the folder's `config.json`.
    """
    for path, text in texts.items():
        home = (target / path).parent
        atomic_files.make_folder(home)
        marks = {CONFIG: manifest.Mark.of(text.encode())}
        atomic_files.write_atomic(home / MARKER, manifest.encode(marks))
        atomic_files.write_atomic(target / path, text.encode())


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: our marker, and its configuration."""
    with _refused(folder):
        return _is_marker(folder / MARKER) and (folder / CONFIG).is_file()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run folder's config.json.

    Raises:
        RunFolderError: no run folder, or a config.json that differs from what was written.
    """
    with _refused(folder):
        if not (folder / CONFIG).is_file():
            raise RunFolderError(
                f"{folder} is not a run folder (it has no {CONFIG}): give the folder that a run "
                "printed"
            )
        if not (folder / MARKER).is_file():
            raise RunFolderError(
                f"{folder} is not a run folder (it has no {MARKER}): give the folder that a run "
                "printed"
            )
    text = manifest.checked(folder, CONFIG, manifest.read(folder, MARKER))
    config = json.loads(text)
    schema = config.get("schema") if isinstance(config, dict) else None
    if schema != SCHEMA:
        raise RunFolderError(
            f"{folder} was written in schema {schema}, this version reads {SCHEMA}: use the "
            "version that wrote it"
        )
    content: dict[str, Any] = config
    return content


def load(folder: Path) -> tuple[RunPlan, dict[str, Any]]:
    """Return the plan of a run folder, and its config.json.

    Raises:
        RunFolderError: no such folder, or not one this version can read.
        UsageError: objects of the user's own took part, which a folder does not hold.
    """
    config = config_of(folder)
    params = dict(config.get("protocol", {}))
    own = sorted(name for name, value in params.items() if isinstance(value, dict))
    if own:
        raise UsageError(
            f"{folder} was run with objects of your own ({', '.join(own)}), which it does not hold:"
            " go on, load or replay it from Python, with these objects"
        )
    try:
        protocol = protocol_class(params.pop("name"))(**params)
        simulation = None if config["simulation"] is None else Simulation(**config["simulation"])
        plan = RunPlan(protocol, simulation, Settings(**config["settings"]))
    except (KeyError, TypeError) as error:
        raise RunFolderError(
            f"{folder / CONFIG} does not parse ({type(error).__name__}): start the run anew"
        ) from None
    return plan, config


def check_same(folder: Path, recorded: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raise RunFolderError where a folder holds a run that differs from the planned one.

    The version may be another one.
    """
    for name in ("protocol", "settings", "clients", "data_digest", "network"):
        if recorded[name] != planned[name]:
            difference = _difference(name, recorded[name], planned[name])
            raise RunFolderError(
                f"{folder} holds a run of another configuration ({difference}): resume with the "
                "same one, or give another folder"
            )


def _difference(name: str, recorded: Any, planned: Any) -> str:
    """Return in words how an entry of config.json differs, by its first value that does."""
    if name == "data_digest":
        return "it ran on other data"
    if name == "clients":
        return "its clients had other names"
    for option in [*recorded, *planned]:
        old, new = recorded.get(option), planned.get(option)
        if old == new:
            continue
        if isinstance(old, dict | list) or isinstance(new, dict | list):
            return f"another {option}"
        return f"{option} was {old!r} there and is {new!r} now"
    return "its options"


def finished(folder: Path) -> bool:
    """Return whether a run in a folder has ended.

    Raises:
        RunFolderError: it has, and its result was lost since.
    """
    if (folder / RESULT).is_file():
        return True
    if (folder / manifest.NAME).is_file() and not checkpoints(folder):
        raise manifest.missing(folder / RESULT)
    return False


def result_of(folder: Path) -> dict[str, Any]:
    """Return the content of a finished run's result.json.

    Every file of the run but its frames is checked before.

    Raises:
        RunFolderError: a file is missing or differs from what the run wrote.
    """
    marks = manifest.read(folder)
    if RESULT not in marks:
        raise manifest.damaged(folder / manifest.NAME)
    manifest.check(folder, marks)
    content = json.loads(manifest.checked(folder, RESULT, marks))
    if not isinstance(content, dict):
        raise manifest.damaged(folder / RESULT)
    return content


def tidy(folder: Path) -> None:
    """Remove, as far as possible, checkpoints that a kill at the very end left beside a result."""
    if checkpoints(folder):
        with suppress(RunFolderError), locked(folder):
            remove_checkpoints(folder)


def seal(folder: Path, result: bytes) -> None:
    """Write the manifest of a run that has ended, and then its result.json.

    The presence of result.json says that the folder is whole.
    """
    marks = {RESULT: manifest.Mark.of(result)}
    read_back = READ_BACK | {INDEX}
    for path in sorted([*folder.iterdir(), folder / TRANSCRIPT / INDEX]):
        if path.is_file() and path.name in read_back:
            name = path.relative_to(folder).as_posix()
            marks[name] = manifest.Mark.of_file(path)
    atomic_files.write_atomic(folder / manifest.NAME, manifest.encode(marks))
    atomic_files.write_atomic(folder / RESULT, result)


def comparison_json(names: Sequence[str]) -> str:
    """Return the text of a comparison's config.json.

    The options of each protocol stand in the folder of its name.
    """
    content = {"schema": SCHEMA, "version": securecluster.__version__, "compare": list(names)}
    return json.dumps(content, indent=2) + "\n"


def compared(folder: Path) -> list[str] | None:
    """Return the protocols that a comparison's folder compares; None where it holds a single run.

    Raises:
        RunFolderError: no run folder, or a damaged one.
    """
    names = config_of(folder).get("compare")
    if not isinstance(names, list):
        return None
    return [str(name) for name in names]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder alone.

    Raises:
        RunFolderError: no run folder, another process holds it, or it cannot be locked.
    """
    if not is_run(folder):
        config_of(folder)  # says what is missing
    with _locked(folder):
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunFolderError(
            f"{folder} is being written by another process: wait for it, or stop it first"
        ) from None
    except OSError as error:
        raise RunFolderError(
            f"cannot lock {folder} ({error.strerror}): check its permissions"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _refused(target: Path) -> Iterator[None]:
    """Turn what the operating system says of a path into a sentence."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunFolderError(f"cannot use {target} ({reason}): choose another folder") from error
