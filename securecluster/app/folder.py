"""A run folder: made whole or not at all, locked while a run writes to it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import securecluster
from securecluster import files
from securecluster.app.options import Simulation, protocol_class
from securecluster.data import Federation
from securecluster.errors import RunFolderError, UsageError
from securecluster.protocols.base import Protocol
from securecluster.settings import Settings

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Enough to repeat a run: what `config.json` holds."""

    protocol: Protocol
    simulation: Simulation
    settings: Settings

    def as_json(self, federation: Federation) -> str:
        """The text of config.json."""
        content = {
            "schema": SCHEMA,
            "version": securecluster.__version__,
            "protocol": {"name": self.protocol.name, **self.protocol.get_params()},
            "simulation": dataclasses.asdict(self.simulation),
            "settings": dataclasses.asdict(self.settings),
            "data_digest": federation.digest(),
            "clients": list(federation.names),
            "network": self.protocol.config(federation, self.settings.dtype),
        }
        return json.dumps(content, indent=2) + "\n"


def check_free(target: Path | None, force: bool) -> None:
    """Raise UsageError where the folder exists and is not empty, and `force` is not given or it is no run folder."""
    if target is None or not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise UsageError(f"{target} exists and is not empty: choose another --out, or --force to replace the run in it")
    if not (target / "config.json").is_file():
        raise UsageError(f"{target} is not a run folder, so --force will not delete it: choose another --out")


def create(out: Path | None, force: bool, name: str, texts: dict[str, str]) -> Path:
    """Make a folder, by one rename, with texts in it (by path in the folder).

    Args:
        out: where; None is a new folder `runs/NAME-TIME-PID`.

    Raises:
        UsageError: it exists and is not empty, and `force` is not given or it is no run folder.
    """
    target = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    check_free(target, force)
    _check_idle(target)
    files.make_folder(target.parent)
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise RunFolderError(
            f"cannot make a run folder in {target.parent} ({error.strerror}): check the path and its permissions"
        ) from error
    draft.chmod(0o755)
    try:
        for path, text in texts.items():
            files.make_folder((draft / path).parent)
            files.write_atomic(draft / path, text.encode())
        if target.exists():
            shutil.rmtree(target)
        files.move(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _check_idle(target: Path) -> None:
    """Raise RunFolderError where another process writes to the run in a folder, or to one of a comparison's runs."""
    for config in (target / "config.json", *target.glob("*/config.json")):
        if config.exists():
            with locked(config.parent):
                pass


def load(folder: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan of a run folder, and its config.json.

    Raises:
        RunFolderError: no such folder, or not one this version can read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise RunFolderError(f"{folder} is not a run folder (it has no config.json): give the folder that a run printed")
    try:
        config = json.loads(files.read(path))
        if config["schema"] != SCHEMA:
            raise RunFolderError(
                f"{folder} was written in schema {config['schema']}, this version reads {SCHEMA}: use the version that wrote it"
            )
        params = dict(config["protocol"])
        protocol = protocol_class(params.pop("name"))(**params)
        plan = Plan(protocol, Simulation(**config["simulation"]), Settings(**config["settings"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} does not parse ({type(error).__name__}): restore it, or start the run anew") from None
    return plan, config


def comparison_json(names: Sequence[str]) -> str:
    """The text of a comparison's config.json; what each protocol runs with stands in the folder of its name."""
    return json.dumps({"schema": SCHEMA, "version": securecluster.__version__, "compare": list(names)}, indent=2) + "\n"


def compared(folder: Path) -> list[str] | None:
    """The protocols that a comparison's folder compares; None where it is none."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(files.read(path))
    except ValueError:
        return None
    names = config.get("compare") if isinstance(config, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder alone; the operating system lets go when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
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
