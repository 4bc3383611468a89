"""Run folders: claimed by one process at a time, marked as ours, checked when they are read back.

Only files that a run wrote are ever removed: a folder without our marker, or with a file of
somebody else in it, is refused. What is removed was listed before, one by one, and lies in the
folder itself: no name in a file leads out of it, and no link is followed. A process that writes
holds a lock from before the first check until the end; the operating system releases it when the
process ends, however it ends.

Checks are made again under the lock, before anything is removed. Files are written and removed in
place, so `.`, links and mount points can be run folders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import securecluster
from securecluster.core import atomic_files, folder_lock, manifest, serialization
from securecluster.core.atomic_files import MARKER
from securecluster.core.number_format import enumerated, printable
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UsageError
from securecluster.folders.schemas import (
    ComparisonConfig,
    Result,
    RunConfig,
    SweepConfig,
    checked_result,
)
from securecluster.messaging.transcript import INDEX
from securecluster.messaging.transcript import OWN as FRAMES
from securecluster.parties import newcomers
from securecluster.parties.derived import params_as_json
from securecluster.parties.method import Method
from securecluster.privacy import run_secret
from securecluster.runtime.run import FILES as CHECKPOINT_FILES
from securecluster.runtime.run import LAST, checkpoints, keep_last_round
from securecluster.runtime.run import OWN as CHECKPOINT
from securecluster.runtime.settings import Settings

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

SCHEMA = 3  # of config.json and result.json
# schemas of run folders that this version reads: its own, and from 0.2 on the one before it
READ = (SCHEMA,)
CONFIG = "config.json"
RESULT = "result.json"
LONGER = "longer.json"  # the length of a run that goes on for longer than it was begun with
LOCK = folder_lock.NAME
TRANSCRIPT = "transcript"
COMPARISON = "compare.json"
ENDINGS = ("png", "pdf", "svg")  # of a sweep's pictures
PICTURES = (
    "accuracy.png", "perplexity.png", "position_error.png", "cost.png", "dendrogram.png",
    "graph.png", "relevance.png", "separation.png", "similarity.png", "similarity-pairs.png",
    "tree.png",
)  # fmt: skip
# files with a digest in the manifest of a run that has ended
READ_BACK = {
    CONFIG, LONGER, "history.jsonl", "ledger.jsonl", "clients.safetensors", "learned.safetensors",
    "models.safetensors", "server.safetensors", "start.safetensors", "earlier.safetensors",
}  # fmt: skip
# of `report`, of all audits, and of `audit` before each adversary had files of its own
PAGES = ("report.html", "audit-overview.html", "audit.html", "audit.json")
# of `audit`: who attacks, with whom, and the budget
AUDITS = re.compile(
    r"audit-(server|authority|wire|client-\w+|[0-9a-f]{16})(-[a-z0-9]+)*\.(html|json|manifest)"
)
SWEEP_RUNS = "runs.jsonl"  # a line per finished run of a sweep
SWEEP_TABLES = (
    "runs.csv", "runs.parquet", "summary.csv", "summary.parquet", "summary.tex", "thresholds.csv",
    "paired.csv", "privacy.txt",
)  # fmt: skip
SWEEP_PICTURES = tuple(
    f"{name}.{ending}" for name in ("noise", "epsilon", "bytes") for ending in ENDINGS
)
FAILURES = "failures.txt"  # tracebacks of runs of a sweep or a comparison
SWEPT = {SWEEP_RUNS, FAILURES, *SWEEP_TABLES, *SWEEP_PICTURES}
# further files of a field, which has a picture a setting
FIELD_TUNING = "tuning.jsonl"
FIELD = {
    FIELD_TUNING, "field.html", "field.tex",
    *(f"field-{number}.{ending}" for number in range(1, 10) for ending in ENDINGS),
}  # fmt: skip
WRITTEN = {
    *READ_BACK, *PICTURES, *PAGES, RESULT, run_secret.FILE, manifest.NAME, MARKER, newcomers.NAME,
    newcomers.KEPT,
}  # fmt: skip
# what `--force` may remove in a folder whose marker says that it is a run's
OWN = atomic_files.Own(
    (MARKER,),
    re.compile(
        "([^/]+/)?("  # the run of a comparison
        + "|".join(re.escape(name) for name in sorted({*WRITTEN, *SWEPT, *FIELD, COMPARISON, LOCK}))
        + rf"|{AUDITS.pattern}|{TRANSCRIPT}(/({FRAMES.names.pattern}))?"
        + rf"|{CHECKPOINT.names.pattern})"
    ),
)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Everything that config.json needs to repeat a run.

    Args:
        protocol: with its hyper-parameters.
        simulation: options that make the clients; None for data from Python, which no options make.
        settings: of the run.
    """

    protocol: Method
    simulation: Simulation | None
    settings: Settings

    def content(self, federation: Federation) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            federation: the clients and their data.
        """
        simulation = None
        if self.simulation is not None:
            simulation = dataclasses.asdict(self.simulation)
        network = self.protocol.config(federation, self.settings.dtype)
        digest = federation.digest()
        return config_content(
            self.protocol, simulation, self.settings, digest, federation.names, network
        )

    def as_json(self, federation: Federation) -> str:
        """Return the text of config.json.

        Args:
            federation: the clients and their data.
        """
        return as_text(self.content(federation))


def config_content(
    protocol: Method,
    simulation: Mapping[str, Any] | None,
    settings: Settings,
    data_digest: str,
    names: Sequence[str],
    network: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        protocol: with its hyper-parameters.
        simulation: options that make the clients; None for others.
        settings: of the run.
        data_digest: of the clients' data; "" for a server, which has none.
        names: of the clients.
        network: what clients and server agreed on.
    """
    content = {
        "schema": SCHEMA,
        "version": securecluster.__version__,
        "protocol": {"name": protocol.name, **params_as_json(protocol)},
        "simulation": simulation,
        "settings": dataclasses.asdict(settings),
        "data_digest": data_digest,
        "clients": list(names),
        "network": network,
    }
    # tuples become lists, as they are read back
    as_read: dict[str, Any] = json.loads(json.dumps(content))
    return as_read


def as_text(content: Mapping[str, Any]) -> str:
    """Return the text of config.json.

    Args:
        content: of the file.
    """
    return json.dumps(content, indent=2) + "\n"


def of_server(config: Mapping[str, Any]) -> bool:
    """Return whether a run is a server's own, whose clients are nodes elsewhere.

    Args:
        config: content of its config.json.
    """
    return not config["data_digest"]


def _default_folder(name: str) -> Path:
    """Return a new path under runs/.

    Args:
        name: that the folder's name begins with.
    """
    start = time.strftime("%Y%m%d-%H%M%S")
    # two processes may start in the same second
    return Path("runs", f"{name}-{start}-{os.getpid()}")


def check_free(target: Path | None, force: bool) -> None:
    """Check that a run can be written to a folder.

    Args:
        target: the folder; None is a new one.
        force: True if a run in the folder is to be replaced.

    Raises:
        UsageError: the folder is in use, or the path is no folder.
        RunFolderError: the operating system refuses the path.
    """
    if target is None or not used(target):
        return
    with _refused(target):
        content = _kind(target)
        if not _is_marker(target / MARKER):
            raise UsageError(
                f"{target} is no run folder and not empty, and nothing deletes it: choose another "
                "--out"
            )
        if not force:
            raise UsageError(
                f"{target} exists and is not empty: choose another --out, or --force to replace "
                f"the {content} in it"
            )
        foreign_paths = foreign(target)
        if foreign_paths:
            first = foreign_paths[0].relative_to(target)
            raise UsageError(
                f"{target} holds {first}, which the {content} in it did not write, so --force will "
                "not delete it: move it, or choose another --out"
            )


def used(target: Path) -> bool:
    """Return whether a folder contains more than what a start that was killed leaves.

    Args:
        target: the folder, which may not exist.

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
    if path.name == LOCK:
        return not path.stat().st_size
    if _is_marker(path):
        return True
    final_name = atomic_files.final_name(path.name)
    is_half_written = final_name != path.name
    return is_half_written and final_name in WRITTEN


def _is_marker(path: Path) -> bool:
    """Return whether a file is a marker of a run folder.

    Args:
        path: of the file, which may not exist.
    """
    if path.name != MARKER or path.is_symlink() or not path.is_file():
        return False
    # not the name alone: `--force` removes files on the word of a marker
    config_entry = f'"{CONFIG}"'.encode()
    return config_entry in atomic_files.read(path)


def foreign(folder: Path) -> list[Path]:
    """Return the paths in a run folder, or in the runs of a comparison, that no run wrote.

    Args:
        folder: of a run or a comparison.
    """
    return _contents(folder).foreign


@dataclasses.dataclass
class _Contents:
    """Paths below a run folder; a folder stands after what it contains.

    Attributes:
        written: by a run.
        foreign: by somebody else; links are, since no run writes any.
        runs: of a comparison, each with a marker of its own.
    """

    written: list[Path] = dataclasses.field(default_factory=list)
    foreign: list[Path] = dataclasses.field(default_factory=list)
    runs: list[Path] = dataclasses.field(default_factory=list)

    def add(self, other: _Contents) -> None:
        """Add the contents of a folder within the run folder."""
        self.written += other.written
        self.foreign += other.foreign
        self.runs += other.runs


def _contents(folder: Path) -> _Contents:
    """Return what a run folder contains, without following links.

    Args:
        folder: of a run, a comparison or a sweep.
    """
    names = _names_compared(folder)
    own_names = WRITTEN | {LOCK}
    if names:
        own_names |= {COMPARISON, FAILURES}
    if _is_sweep(folder):
        own_names |= SWEPT | FIELD
    contents = _Contents()
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            contents.foreign.append(path)
        elif path.is_dir():
            contents.add(_contents_below(path, names))
        elif path.is_file() and _is_called(path, own_names):
            contents.written.append(path)
        else:
            contents.foreign.append(path)
    return contents


def _kind(folder: Path) -> str:
    """Return what a folder holds: a run, a comparison or a sweep."""
    if _names_compared(folder):
        return "comparison"
    if _is_sweep(folder):
        return "sweep"
    return "run"


def _is_called(path: Path, written: Collection[str]) -> bool:
    """Return whether a file has a name that a run or an audit gives, also if it is half-written."""
    name = atomic_files.final_name(path.name)
    return name in written or AUDITS.fullmatch(name) is not None


def _names_compared(folder: Path) -> list[str]:
    """Return the runs that a folder compares; none where it has a single run, or is damaged."""
    try:
        return compared(folder) or []
    except RunFolderError:
        return []


def _is_sweep(folder: Path) -> bool:
    """Return whether a folder holds a sweep; False where it is damaged."""
    try:
        return swept(folder) is not None
    except RunFolderError:
        return False


def _contents_below(folder: Path, runs: Collection[str]) -> _Contents:
    """Return what a folder within a run folder contains.

    Args:
        folder: a run of a comparison, a checkpoint, a transcript, or anything else; no link.
        runs: the names of the runs that the run folder compares.
    """
    # of a run that a kill left without its marker, only the lock remains
    is_run_of_ours = _is_marker(folder / MARKER) or not used(folder)
    if folder.name in runs and is_run_of_ours:
        contents = _contents(folder)
        contents.runs.append(folder)
    elif CHECKPOINT.names.fullmatch(folder.name):
        contents = _files_called(folder, CHECKPOINT_FILES)
    elif folder.name == TRANSCRIPT:
        contents = _files_called(folder, FRAMES.names)
    else:
        return _Contents(foreign=[folder])
    contents.written.append(folder)
    return contents


def _files_called(folder: Path, names: re.Pattern[str]) -> _Contents:
    """Return the files of a folder; those that are not called like this are foreign."""
    contents = _Contents()
    for path in folder.iterdir():
        if _is_file_called(path, names):
            contents.written.append(path)
        else:
            contents.foreign.append(path)
    return contents


def _is_file_called(path: Path, names: re.Pattern[str]) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    return names.fullmatch(atomic_files.final_name(path.name)) is not None


@contextmanager
def claimed(out: Path | None, force: bool, name: str, texts: Mapping[str, str]) -> Iterator[Path]:
    """Claim a folder for a run, write its first files, and hold its lock.

    The folder itself is never renamed or removed: `.`, a mount point and a link to a folder will
    do.

    Args:
        out: the folder; None is a new one, `runs/NAME-TIME-PID`.
        force: replace the run in the folder.
        name: NAME of a new folder.
        texts: contents of config.json by path in the folder, of a comparison also those of its
            runs.

    Yields:
        The folder.

    Raises:
        UsageError: the folder is in use, and `force` is not given or does not apply.
        RunFolderError: the folder cannot be written, or another process writes there.
    """
    target = out or _default_folder(name)
    check_free(target, force)
    with _refused(target):
        new = not target.exists()
    atomic_files.make_folder(target)
    # The lock is taken before the check that counts, so of two processes that start at once one is
    # refused and neither loses anything.
    with _locked(target):
        check_free(target, force)
        _replace(target)
        try:
            _write_texts(target, texts)
        except BaseException:
            _remove_texts(target, texts)
            if new:
                _remove_empty(target)
            raise
        yield target


def _replace(target: Path) -> None:
    """Remove the run, or the comparison and its runs, in a folder that contains nothing else.

    Args:
        target: the folder, whose lock this process holds.

    Raises:
        RunFolderError: another process writes there, or a file cannot be removed.
    """
    runs = _contents(target).runs
    # all locks before anything is removed: a run may be resumed by itself
    with ExitStack() as locks:
        for run in runs:
            locks.enter_context(_locked(run))
        contents = _contents(target)
        if contents.foreign or contents.runs != runs:
            raise RunFolderError(
                f"another process has just written to {target}: wait for it, or stop it first"
            )
        retained_paths = {target / LOCK, *runs, *(run / LOCK for run in runs)}
        paths = [path for path in contents.written if path not in retained_paths]
        own_paths = [path for path in paths if not any(path.is_relative_to(run) for run in runs)]
        of_runs = [path for path in paths if path not in own_paths]
        # below the folder: a run that has become a link meanwhile is not followed
        _remove(target, sorted(of_runs, key=_order_of_removal))
    for run in runs:  # their locks are free, and can be removed on every system
        _remove_empty(run)
    # config.json says which files are a sweep's or a comparison's: it goes when these are gone
    is_one_run = _kind(target) == "run"
    order = _order_of_removal if is_one_run else _order_of_several
    _remove(target, sorted(own_paths, key=order))


def _order_of_removal(path: Path) -> int:
    """Return when a file of a run is removed.

    config.json comes first, so that a folder in which a kill left some of the files is no run, and
    the marker last, so that such a folder can still be replaced.
    """
    return {CONFIG: 0, MARKER: 2}.get(path.name, 1)


def _order_of_several(path: Path) -> int:
    """Return when a file of a sweep or a comparison is removed: config.json before the marker."""
    return {CONFIG: 1, MARKER: 2}.get(path.name, 0)


def _remove(target: Path, paths: Sequence[Path]) -> None:
    """Remove files and empty folders below a folder.

    Args:
        target: the folder.
        paths: in the order in which they are removed.

    Raises:
        RunFolderError: a file cannot be removed.
    """
    try:
        for path in paths:
            atomic_files.remove_below(target, path.relative_to(target), OWN)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunFolderError(
            f"cannot remove all of the run in {target} ({reason}): remove the rest by hand, or "
            "choose another folder"
        ) from error


def _remove_empty(target: Path) -> None:
    """Remove an empty folder with its lock file, where the system allows it."""
    with suppress(OSError, RunFolderError):
        atomic_files.remove(target, LOCK, OWN)
        atomic_files.remove_empty_folder(target)


def _write_texts(target: Path, texts: Mapping[str, str]) -> None:
    """Write each config.json, and before it its folder's marker.

    Args:
        target: the folder of the run or comparison.
        texts: contents of config.json by path in the folder.
    """
    for path, text in texts.items():
        folder = (target / path).parent
        atomic_files.make_folder(folder)
        data = text.encode()
        # the marker has the digest of config.json, which is not in the manifest before the end
        marker = manifest.encode({CONFIG: manifest.Mark.of(data)})
        atomic_files.write_atomic(folder / MARKER, marker)
        atomic_files.write_atomic(target / path, data)


def _remove_texts(target: Path, texts: Mapping[str, str]) -> None:
    """Remove what `_write_texts` has written, as far as possible."""
    for path in texts:
        folder = (target / path).parent
        for name in (CONFIG, MARKER):
            with suppress(RunFolderError):
                atomic_files.remove(folder, name, OWN)
        if folder != target:
            with suppress(OSError):
                atomic_files.remove_empty_folder(folder)


def remove_half_written(folder: Path) -> None:
    """Delete the temporary files that a run which was killed has left.

    Args:
        folder: of the run, whose lock this process holds.
    """
    atomic_files.remove_half_written(folder, OWN)
    atomic_files.remove_half_written(folder / TRANSCRIPT, FRAMES)


def is_run(folder: Path) -> bool:
    """Return whether a folder contains a run: our marker, and its configuration.

    Args:
        folder: which may not exist.

    Raises:
        RunFolderError: the operating system refuses the path.
    """
    with _refused(folder):
        return _is_marker(folder / MARKER) and (folder / CONFIG).is_file()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run folder's config.json.

    Args:
        folder: of a run or a comparison.

    Raises:
        RunFolderError: no run folder, or a config.json that differs from what was written.
    """
    with _refused(folder):
        for name in (CONFIG, MARKER):
            if not (folder / name).is_file():
                raise RunFolderError(
                    f"{folder} is not a run folder (it has no {name}): give the folder that a run "
                    "printed"
                )
    marks = manifest.read(folder, MARKER)
    text = manifest.checked(folder, CONFIG, marks)
    config = serialization.parsed(folder / CONFIG, text)
    schema = version = None
    if isinstance(config, dict):
        schema, version = config.get("schema"), config.get("version")
    if schema not in READ:
        wrote = f" (securecluster {printable(version)[:20]})" if isinstance(version, str) else ""
        raise RunFolderError(
            f"{folder} was written in schema {schema!r:.20}, this version reads "
            f"{enumerated('schema', READ)}: use the version that wrote it{wrote}"
        )
    content: dict[str, Any] = config
    return content


def run_config(folder: Path) -> RunConfig:
    """Return the content of a run's config.json, with the types that a run writes.

    The options of its protocol are those of a class, and may be anything here.

    Args:
        folder: of a run.

    Raises:
        RunFolderError: no run folder, or a config.json that no run wrote.
        UsageError: the folder contains a sweep.
    """
    content = config_of(folder)
    check_run(folder, content)
    path = folder / CONFIG
    config = serialization.checked(path, content, RunConfig)
    config["protocol"] = {**config["protocol"], **_length(folder)}
    delta: Any = config["network"].get("delta")
    serialization.refuse(path, serialization.fault_of(delta, float, "network.delta"))
    if not 0 <= delta < 1:
        serialization.refuse(path, "network.delta is no probability")
    if config["simulation"] is not None:
        if config["version"] != securecluster.__version__:
            config["simulation"] = {**defaults_of(Simulation), **config["simulation"]}
        check_options(path, "simulation", config["simulation"], Simulation)
    config["settings"] = Settings.without_left(config["settings"])
    check_options(path, "settings", config["settings"], Settings)
    return config


def _length(folder: Path) -> dict[str, int]:
    """Return the option of a run's length, where it was made longer.

    Raises:
        RunFolderError: a file that no run wrote.
    """
    path = folder / LONGER
    if not path.is_file():
        return {}
    content = serialization.parsed(path, atomic_files.read(path))
    return serialization.checked(path, content, dict[str, int])


def make_longer(folder: Path, length: Mapping[str, int]) -> None:
    """Let a run have not ended, and be longer from now on.

    Args:
        folder: of the run, whose lock this process holds, with a checkpoint to go on from.
        length: the option that says how long it is.

    Raises:
        RunFolderError: a file cannot be removed or written.
    """
    # without a result it is a stopped run, and a kill in between leaves one
    stale = [RESULT, manifest.NAME, *PICTURES, *PAGES]
    stale += [path.name for path in sorted(folder.iterdir()) if AUDITS.fullmatch(path.name)]
    for name in stale:
        atomic_files.remove(folder, name, OWN)
    text = json.dumps(dict(length)) + "\n"
    atomic_files.write_atomic(folder / LONGER, text.encode(), durable=True)


def defaults_of(options: type) -> dict[str, Any]:
    """Return the defaults of a class of options: what those that came later are in an old folder.

    Args:
        options: the class, a dataclass.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}


def check_options(path: Path, entry: str, values: dict[str, Any], options: type) -> None:
    """Raise RunFolderError for values that are no options of a class.

    Args:
        path: of config.json.
        entry: that holds the values.
        values: options by name.
        options: the class, a dataclass.
    """
    # the library writes all fields: a default would silently stand for what was removed
    for field in dataclasses.fields(options):
        if field.name not in values:
            serialization.refuse(path, f"{entry}.{field.name} is missing")
    serialization.refuse(path, serialization.fault_of(values, options, entry))


def check_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that a folder does not contain a sweep.

    Args:
        folder: of a run or a sweep.
        config: content of its config.json.

    Raises:
        UsageError: it contains a sweep.
    """
    if "sweep" in config:
        raise UsageError(
            f"{folder} holds a sweep, whose runs have no folders: its numbers are in runs.csv"
        )


def check_same(folder: Path, recorded: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Check that a folder contains the planned run.

    Args:
        folder: of a run.
        recorded: content of its config.json.
        planned: content of the planned run's config.json.

    Raises:
        RunFolderError: it contains another run.
    """
    # not "version": a run may be resumed by a later one
    for name in ("protocol", "settings", "clients", "data_digest", "network"):
        if recorded[name] != planned[name]:
            difference = _difference(name, recorded[name], planned[name])
            raise RunFolderError(
                f"{folder} holds a run of another configuration ({difference}): resume with the "
                "same one, give another folder, or replace the run with force=True"
            )


def _difference(name: str, recorded: Any, planned: Any) -> str:
    """Return in words how an entry of config.json differs, by its first value that does.

    Args:
        name: of the entry.
        recorded: its value in the folder.
        planned: its value in the planned run.
    """
    if name == "data_digest":
        return "it ran on other data"
    if name == "clients":
        return "its clients had other names"
    for option in [*recorded, *planned]:
        old = recorded.get(option)
        new = planned.get(option)
        if old == new:
            continue
        if option == "model" and _same_module(old, new):
            return (
                "another model: the first weights of an own module differ from run to run unless "
                "torch.manual_seed is called just before it is made"
            )
        # lists and objects are too long for a sentence
        if isinstance(old, dict | list) or isinstance(new, dict | list):
            return f"another {option}"
        return f"{option} was {old!r} there and is {new!r} now"
    return "its options"


def _same_module(old: Any, new: Any) -> bool:
    """Return whether two modules, as config.json describes them, differ in their weights alone."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return False
    return {**old, "weights": ""} == {**new, "weights": ""}


def finished(folder: Path) -> bool:
    """Return whether a run in a folder has ended.

    Args:
        folder: of the run.

    Raises:
        RunFolderError: it has, and its result was lost since.
    """
    with _refused(folder):
        if (folder / RESULT).is_file():
            return True
        # the manifest is written just before the result, when the checkpoints are still there
        has_manifest = (folder / manifest.NAME).is_file()
        if has_manifest and not checkpoints(folder):
            raise manifest.missing(folder / RESULT)
    return False


def check_under_way(folder: Path) -> None:
    """Raise RunFolderError if the run in a folder has ended.

    Args:
        folder: of the run.
    """
    if finished(folder):
        raise RunFolderError(f"the run in {folder} has ended: load it, or give another folder")


def result_of(folder: Path) -> Result:
    """Return the content of a finished run's result.json, with the types that a run writes.

    Every file of the run but its frames is checked before.

    Args:
        folder: of the run.

    Raises:
        RunFolderError: a file is missing or differs from what the run wrote.
    """
    marks = manifest.read(folder)
    if RESULT not in marks:
        raise manifest.damaged(folder / manifest.NAME)
    manifest.check(folder, marks)
    if (folder / LAST).is_dir():
        manifest.check(folder / LAST, manifest.read(folder / LAST))
    text = manifest.checked(folder, RESULT, marks)
    path = folder / RESULT
    return checked_result(path, serialization.parsed(path, text))


def tidy(folder: Path) -> None:
    """Remove, as far as possible, checkpoints that a kill at the very end left beside a result.

    Args:
        folder: of a run that has ended.
    """
    if checkpoints(folder):
        # a folder that can only be read may keep them
        with suppress(RunFolderError), locked(folder):
            keep_last_round(folder)


def seal(folder: Path, result: bytes) -> None:
    """Write the manifest of a run that has ended, and then its result.json.

    Args:
        folder: of the run.
        result: the content of result.json.
    """
    marks = {RESULT: manifest.Mark.of(result)}
    names = READ_BACK | {INDEX}
    paths = [*folder.iterdir(), folder / TRANSCRIPT / INDEX]
    for path in sorted(paths):
        # some files are there for some protocols and settings only
        if path.is_file() and path.name in names:
            name = path.relative_to(folder).as_posix()
            marks[name] = manifest.Mark.of_file(path)
    atomic_files.write_atomic(folder / manifest.NAME, manifest.encode(marks))
    # last: its presence says that the folder is complete
    atomic_files.write_atomic(folder / RESULT, result)


def comparison_json(names: Sequence[str]) -> str:
    """Return the text of a comparison's config.json.

    The options of each protocol are in the folder of its name.

    Args:
        names: of the protocols, each with the options of its own.
    """
    content = {"schema": SCHEMA, "version": securecluster.__version__, "compare": list(names)}
    return json.dumps(content, indent=2) + "\n"


def compared(folder: Path) -> list[str] | None:
    """Return the protocols that a folder compares; None where it contains a single run.

    Each one is the name of a protocol, or that and options of its own, and of a folder in this one.

    Args:
        folder: of a run or a comparison.

    Raises:
        RunFolderError: no run folder, a damaged one, or one that compares something else.
    """
    content = config_of(folder)
    if "compare" not in content:
        return None
    path = folder / CONFIG
    names = serialization.checked(path, content, ComparisonConfig)["compare"]
    serialization.refuse(path, _fault_of_names(names))
    return names


def _fault_of_names(names: Sequence[str]) -> str | None:
    """Return what is wrong with the names of a comparison."""
    for position, name in enumerate(names):
        # names of installed packages' protocols are theirs to choose
        if Path(name).name != name or name == "..":
            return f"compare[{position}] is no protocol"
    if not names or len(set(names)) < len(names):
        return "compare is not a list of different protocols"
    return None


def sweep_json(plan: Mapping[str, Any], parallel: Mapping[str, int], data_digest: str) -> str:
    """Return the text of a sweep's config.json.

    Args:
        plan: as JSON values.
        parallel: numbers of runs at the same time, which are no part of the plan.
        data_digest: of the clients of the first seed.
    """
    content = {
        "schema": SCHEMA,
        "version": securecluster.__version__,
        "sweep": plan,
        "parallel": parallel,
        "data_digest": data_digest,
    }
    return json.dumps(content, indent=2) + "\n"


def swept(folder: Path) -> dict[str, Any] | None:
    """Return the plan of the sweep that a folder contains; None where it contains no sweep.

    Args:
        folder: of a run, a comparison or a sweep.

    Raises:
        RunFolderError: no run folder, or a damaged one.
    """
    content = config_of(folder)
    if "sweep" not in content:
        return None
    plan = serialization.checked(folder / CONFIG, content, SweepConfig)["sweep"]
    if isinstance(plan.get("settings"), dict):  # those of a field are in the plan's own
        plan["settings"] = Settings.without_left(plan["settings"])
    return plan


def is_being_written(folder: Path) -> bool:
    """Return whether another process writes the run in a folder.

    Args:
        folder: of a run.
    """
    from filelock import Timeout

    if not (folder / LOCK).is_file():
        return False
    try:
        with _locked(folder):
            return False
    except RunFolderError as error:  # of any other kind, nobody knows
        return isinstance(error.__context__, Timeout)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder.

    Args:
        folder: of a run or a comparison.

    Raises:
        RunFolderError: no run folder, another process holds it, or it cannot be locked.
    """
    if not is_run(folder):
        config_of(folder)  # raises an error that says what is missing
    with _locked(folder):
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that may not be a run yet."""
    # a run may take hours: waiting for it is the user's decision
    lock = folder_lock.acquire(folder)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _refused(target: Path) -> Iterator[None]:
    """Turn an error of the operating system about a path into a RunFolderError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunFolderError(f"cannot use {target} ({reason}): choose another folder") from error
