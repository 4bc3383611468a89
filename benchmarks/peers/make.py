"""Make the environments of the peers, one virtual environment each.

python -m benchmarks.peers.make [--where FOLDER] [--only NAME …]

What is complete already is left alone, so that a second call costs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from securecluster.errors import UsageError, unknown

WHERE = Path.home() / ".cache" / "securecluster" / "peers"
ROOT = Path(__file__).resolve().parents[2]
# an earlier version of this project, as `git worktree add` puts it beside this one
BEFORE = ROOT.parent / "before"
# always in the same pip call: an open range may bring another build than this project uses
TORCH = "torch>=2.6,<2.14"
# pfl and Flower are pinned; the CSV names the versions of each peer's packages
NEEDS = {
    "plain": (TORCH, "numpy"),
    "securecluster": (TORCH, "-e", str(ROOT)),
    "before": (TORCH, "-e", str(BEFORE)),
    "pfl": (TORCH, "numpy", "pfl[pytorch]==0.6.0"),
    "flower": (TORCH, "numpy", "flwr[simulation]==1.41.*"),
}
VERSIONS = ("torch", "numpy", "securecluster", "pfl", "flwr", "ray")


def python(name: str, where: Path = WHERE) -> Path:
    """Return the interpreter of an environment.

    Args:
        name: of the environment.
        where: folder of all environments.

    Raises:
        UsageError: the environment is not there, or its installation was not completed.
    """
    if not _complete(name, where):
        raise UsageError(
            f"the environment of {name} is missing in {where}: make it with `python -m "
            "benchmarks.peers.make`"
        )
    return where / name / "bin" / "python"


def versions(interpreter: Path) -> dict[str, str]:
    """Return the versions of an environment's packages that matter here, by name.

    Args:
        interpreter: of the environment.
    """
    code = f"""
import importlib.metadata as metadata, json
found = {{}}
for name in {VERSIONS!r}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
    # -I: isolated from the working folder, whose packages are not the environment's
    command = [str(interpreter), "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    by_name: dict[str, str] = json.loads(done.stdout)
    return by_name


def make(name: str, where: Path = WHERE) -> None:
    """Make one environment, unless it is complete.

    Args:
        name: of the environment.
        where: folder of all environments.

    Raises:
        UsageError: an unknown name, or the installation failed; the sentence names the log.
    """
    if name not in NEEDS:
        raise unknown("environment", name, NEEDS)
    if _complete(name, where):
        return
    folder = where / name
    log = where / f"{name}.log"
    where.mkdir(parents=True, exist_ok=True)
    # clear removes what an incomplete installation left
    venv.create(folder, clear=True, with_pip=True)
    interpreter = folder / "bin" / "python"
    command = [str(interpreter), "-m", "pip", "install", *NEEDS[name]]
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=stream, check=False)
    if done.returncode:
        raise UsageError(f"installing {name} failed: read {log}, then run this again")
    # written last, so that an installation that was cut off, or of other requirements, is repeated
    _mark(name, where).write_text(_wanted(name))


def _mark(name: str, where: Path) -> Path:
    return where / name / "complete"


def _wanted(name: str) -> str:
    return "\n".join(NEEDS[name]) + "\n"


def _complete(name: str, where: Path) -> bool:
    mark = _mark(name, where)
    return mark.exists() and mark.read_text() == _wanted(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make all environments, or the named ones.

    Where one fails, the others are made all the same.

    Args:
        arguments: the command line; None takes the process's own.

    Returns:
        The exit code: 1 where one failed.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.peers.make", description=__doc__)
    parser.add_argument("--where", type=Path, default=WHERE, help="folder of the environments")
    usual = [name for name in NEEDS if name != "before"]
    parser.add_argument("--only", nargs="+", default=usual, help="which ones")
    chosen = parser.parse_args(arguments)
    failed = 0
    for name in chosen.only:
        try:
            make(name, chosen.where)
            interpreter = python(name, chosen.where)
            print(f"{name}: {versions(interpreter)}", flush=True)
        except UsageError as error:
            failed = 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
