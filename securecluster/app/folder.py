"""Run folders: claimed by one process at a time, marked as ours, and checked when they are read back.

Nothing but what a run wrote is ever removed: a folder without our marker, or with a file of somebody else in it, is
refused. Whoever writes holds a lock from before the first check until the end; the operating system lets go of it when
the process ends, however it ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import securecluster
from securecluster import files, manifest
from securecluster.app.options import Simulation, protocol_class
from securecluster.data import Federation
from securecluster.errors import RunFolderError, UsageError
from securecluster.protocols.base import Protocol
from securecluster.settings import Settings
from securecluster.transcript import INDEX

SCHEMA = 1
CONFIG, RESULT = "config.json", "result.json"
MARKER, LOCK = ".securecluster", ".lock"
BOOKKEEPING = {MARKER, LOCK}
TRANSCRIPT = "transcript"
PICTURES = (
    "accuracy.png", "perplexity.png", "position_error.png", "cost.png", "dendrogram.png", "graph.png",
    "relevance.png", "separation.png", "similarity.png", "similarity-pairs.png", "tree.png",
)  # fmt: skip
WRITTEN = {
    *BOOKKEEPING, CONFIG, RESULT, manifest.NAME, "compare.json", "history.jsonl", "ledger.jsonl", *PICTURES,
    "clients.safetensors", "learned.safetensors", "models.safetensors", "server.safetensors", "start.safetensors",
}  # fmt: skip
LISTED = WRITTEN - {*BOOKKEEPING, *PICTURES, RESULT, manifest.NAME}  # what is read back; the result comes last


@dataclasses.dataclass(frozen=True)
class Plan:
    """Enough to repeat a run: what `config.json` holds.

    Args:
        simulation: how the clients are made; None for data that came from Python and are not ours to make again.
    """

    protocol: Protocol
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
        found: dict[str, Any] = json.loads(json.dumps(content))  # tuples become lists, as they are read back
        return found

    def as_json(self, federation: Federation) -> str:
        """Return the text of config.json."""
        return json.dumps(self.content(federation), indent=2) + "\n"


def default_name(name: str) -> Path:
    """Return a new path under runs/."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def check_free(target: Path | None, force: bool) -> None:
    """Raise UsageError where a run cannot be put: a folder that is in use, or anything that is no folder.

    Args:
        force: whether the run in the folder, if there is one, is to be replaced.
    """
    if target is None:
        return
    with _refused(target):
        if target.is_symlink() and not target.exists():
            raise UsageError(f"{target} is a link to nothing: remove it, or choose another --out")
        if target.exists() and not target.is_dir():
            raise UsageError(f"{target} is not a folder: choose another --out")
        if not _used(target):
            return
    if not force:
        raise UsageError(f"{target} exists and is not empty: choose another --out, or --force to replace the run in it")
    if not (target / MARKER).is_file():
        raise UsageError(f"{target} is not a run folder, so --force will not delete it: choose another --out")
    strange = foreign(target)
    if strange:
        raise UsageError(
            f"{target} holds {strange[0].relative_to(target)}, which no run wrote, so --force will not delete it:"
            " move it, or choose another --out"
        )


def _used(target: Path) -> bool:
    """Return whether a folder holds more than bookkeeping."""
    return target.is_dir() and any(path.name not in BOOKKEEPING for path in target.iterdir())


def foreign(folder: Path) -> list[Path]:
    """Return what lies in a run folder, or in the runs of a comparison, and was not written by a run."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            found.append(path)
        elif path.is_dir():
            found += _foreign_below(path)
        elif path.name not in WRITTEN and not _temporary(path.name):
            found.append(path)
    return found


def _foreign_below(folder: Path) -> list[Path]:
    """Return what lies in a folder within a run folder and was not written by a run."""
    if (folder / MARKER).is_file():
        return foreign(folder)
    if folder.name == ".checkpoint.tmp" or re.fullmatch(r"checkpoint-\d{6,}", folder.name):
        return [path for path in folder.iterdir() if path.is_dir() or "." in path.stem.strip(".")]
    if folder.name == TRANSCRIPT:
        return [path for path in folder.iterdir() if not _of_transcript(path)]
    return [folder]


def _of_transcript(path: Path) -> bool:
    frames = path.suffix == ".safetensors" and path.stem.isdigit()
    return path.is_file() and (path.name == INDEX or frames or _temporary(path.name))


def _temporary(name: str) -> bool:
    """Return whether a file is one that a killed write left half-way."""
    return name.startswith(".") and name.endswith(".tmp")


@contextmanager
def claimed(out: Path | None, force: bool, name: str, texts: Mapping[str, str]) -> Iterator[Path]:
    """Take a folder for a run, write its first files, and hold its lock.

    The lock comes before every check, so of two processes that start at once one is refused and neither loses
    anything. The folder itself is never renamed or removed: `.`, a mount point and a link to a folder will do.

    Args:
        out: where; None is a new folder `runs/NAME-TIME-PID`.
        force: replace the run in the folder.
        texts: by path in the folder; `config.json` is written last of each folder's.

    Raises:
        UsageError: the folder is in use, and `force` is not given or does not apply.
        RunFolderError: the disk says no, or another process writes there.
    """
    target = out or default_name(name)
    check_free(target, force)
    with _refused(target):
        new = not target.exists()
    files.make_folder(target)
    with _locked(target):
        check_free(target, force)
        with _all_locked(_runs_in(target)):
            _clear(target)
        try:
            _write_texts(target, texts)
        except BaseException:
            _clear(target)
            if new:
                _remove_empty(target)
            raise
        yield target


def _runs_in(target: Path) -> list[Path]:
    """Return the run folders in a comparison's folder."""
    return sorted(marker.parent for marker in target.glob(f"*/{MARKER}"))


@contextmanager
def _all_locked(folders: Sequence[Path]) -> Iterator[None]:
    """Make sure that nobody writes to any of these run folders."""
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(_locked(folder))
        yield


def _clear(target: Path) -> None:
    """Remove what runs wrote into a folder, which holds nothing else.

    `config.json` goes first, so that what a kill leaves half-way is no run.
    """
    with _refused(target):
        (target / CONFIG).unlink(missing_ok=True)
        for path in target.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


def _remove_empty(target: Path) -> None:
    with suppress(OSError):
        (target / LOCK).unlink(missing_ok=True)
        target.rmdir()


def _write_texts(target: Path, texts: Mapping[str, str]) -> None:
    """Write configurations, each folder's marker, with the digest of its `config.json`, before it."""
    for path, text in texts.items():
        home = (target / path).parent
        files.make_folder(home)
        marks = {CONFIG: manifest.Mark.of(text.encode())}
        files.write_atomic(home / MARKER, manifest.encode(marks))
        files.write_atomic(target / path, text.encode())


def is_run(folder: Path) -> bool:
    """Return whether a folder has our marker."""
    with _refused(folder):
        return (folder / MARKER).is_file()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run folder's config.json.

    Raises:
        RunFolderError: no run folder, or a config.json that differs from what was written.
    """
    with _refused(folder):
        if not (folder / CONFIG).is_file():
            raise RunFolderError(f"{folder} is not a run folder (it has no {CONFIG}): give the folder that a run printed")
        if not (folder / MARKER).is_file():
            raise RunFolderError(f"{folder} is not a run folder (it has no {MARKER}): give the folder that a run printed")
    text = manifest.checked(folder, CONFIG, manifest.read(folder, MARKER))
    config: dict[str, Any] = json.loads(text)
    if config["schema"] != SCHEMA:
        raise RunFolderError(
            f"{folder} was written in schema {config['schema']}, this version reads {SCHEMA}: use the version that wrote it"
        )
    return config


def load(folder: Path) -> tuple[Plan, dict[str, Any]]:
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
        plan = Plan(protocol, simulation, Settings(**config["settings"]))
    except (KeyError, TypeError) as error:
        raise RunFolderError(f"{folder / CONFIG} does not parse ({type(error).__name__}): start the run anew") from None
    return plan, config


def check_same(folder: Path, recorded: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raise RunFolderError where a folder holds a run that differs from the planned one in anything but the version."""
    for name in ("protocol", "settings", "clients", "data_digest", "network"):
        old, new = recorded[name], planned[name]
        if old == new:
            continue
        if name == "data_digest":
            text = "its data were others"
        elif name == "clients":
            text = "its clients had other names"
        else:
            text = _difference(old, new)
        raise RunFolderError(f"{folder} holds a run of another configuration ({text}): resume with the same one, or give another folder")


def _difference(recorded: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Return in words the first value that differs."""
    for name in [*recorded, *planned]:
        old, new = recorded.get(name), planned.get(name)
        if old != new:
            shown = all(not isinstance(value, dict | list) for value in (old, new))
            return f"{name} was {old!r} there and is {new!r} now" if shown else f"another {name}"
    return "its options"


def finished(folder: Path) -> bool:
    """Return whether a run in a folder has ended.

    Raises:
        RunFolderError: it has, and its result was lost since.
    """
    if (folder / RESULT).is_file():
        return True
    if (folder / manifest.NAME).is_file() and not any(folder.glob("checkpoint-*")):
        raise manifest.missing(folder / RESULT)
    return False


def result_of(folder: Path) -> dict[str, Any]:
    """Return the content of a finished run's result.json, after a check of every file of the run but its frames.

    Raises:
        RunFolderError: a file is missing or differs from what the run wrote.
    """
    marks = manifest.read(folder)
    if RESULT not in marks:
        raise manifest.damaged(folder / manifest.NAME)
    manifest.check(folder, marks)
    content: dict[str, Any] = json.loads(manifest.checked(folder, RESULT, marks))
    return content


def seal(folder: Path, result: bytes) -> None:
    """Write the manifest of a run that has ended, and then its result.json, whose presence says that it is whole."""
    marks = {RESULT: manifest.Mark.of(result)}
    for path in sorted([*folder.iterdir(), folder / TRANSCRIPT / INDEX]):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and (path.name in LISTED or path.name == INDEX):
            marks[name] = manifest.Mark.of(files.read(path))
    files.write_atomic(folder / manifest.NAME, manifest.encode(marks))
    files.write_atomic(folder / RESULT, result)


def comparison_json(names: Sequence[str]) -> str:
    """The text of a comparison's config.json; what each protocol runs with stands in the folder of its name."""
    return json.dumps({"schema": SCHEMA, "version": securecluster.__version__, "compare": list(names)}, indent=2) + "\n"


def compared(folder: Path) -> list[str] | None:
    """Return the protocols that a comparison's folder compares; None where it holds a single run.

    Raises:
        RunFolderError: no run folder, or a damaged one.
    """
    names = config_of(folder).get("compare")
    return [str(name) for name in names] if isinstance(names, list) else None


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
        raise RunFolderError(f"{folder} is being written by another process: wait for it, or stop it first") from None
    except OSError as error:
        raise RunFolderError(f"cannot lock {folder} ({error.strerror}): check its permissions") from error
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
