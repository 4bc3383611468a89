"""Make mistakes against rules of security in a copy of the repository, which tests must catch.

python .ci/mutants.py [--only N ...]

`mutants.toml` lists the mistakes, each one changed line with the tests that catch it. The checkout
stays as it is. The exit status is 1 if a mistake survives, or no longer fits the code.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
# folders of the repository that the installed package `securecluster` contains
MAPPED = ("protocols", "attacks")
COPIED = ("securecluster", *MAPPED, "benchmarks", "tests", "docs", ".ci", "pyproject.toml")
# exit status of pytest if a test failed; others are errors of its use or of the collection
FAILED = 1
# errors of code that does not run at all: any test would catch it, so it proves nothing
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError")
LIMIT = 600  # seconds of the tests of one mistake


class DoesNotApplyError(Exception):
    """A mistake that does not fit the code any more."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: one changed line.

    Args:
        mistake: what is wrong, in a sentence.
        file: path from the repository root.
        old: text of the right code, which occurs once in the file.
        new: text of the wrong code.
        tests: file of the tests that catch it, and after " -k " an expression that selects some.
    """

    mistake: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, source: str) -> str:
        """Return a file's text with the mistake.

        Args:
            source: text of the file.

        Raises:
            DoesNotApplyError: the old text does not occur once, or the result does not compile or
                is the same program.
        """
        occurrences = source.count(self.old)
        if occurrences != 1:
            raise DoesNotApplyError(f"its old text occurs {occurrences} times in {self.file}")
        mutated = source.replace(self.old, self.new)
        try:
            changed = ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise DoesNotApplyError(f"its new text does not compile: {error}") from None
        if not changed:
            raise DoesNotApplyError("it changes nothing but the layout")
        return mutated


def load() -> list[Mutant]:
    """Return the mutants of the table."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutant(mistake, **entry) for mistake, entry in table.items()]


def copied(folder: Path) -> None:
    """Copy what tests need into a folder, where a plain import finds the package.

    Args:
        folder: an empty one.
    """
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(ROOT / name, folder / name)
    # an editable installation maps these folders of the checkout into the package
    for name in MAPPED:
        (folder / "securecluster" / name).symlink_to(folder / name, target_is_directory=True)


def verdict(folder: Path, mutant: Mutant) -> str:
    """Return in words what becomes of a mistake in a copy, which is then as before.

    Args:
        folder: of the copy.
        mutant: the mistake.

    Raises:
        DoesNotApplyError: the mistake does not fit the code.
    """
    path = folder / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(source), encoding="utf-8")
    # by time and size, bytecode of a mistake of the same length would be taken for the right one's
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-rfE", "--tb=line"]
    file, *selected = mutant.tests.split(" -k ")
    selection = ["-k", *selected] if selected else []
    try:
        finished = subprocess.run(
            [*command, "-p", "no:cacheprovider", file, *selection],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "ran past its time limit"
    finally:
        path.write_text(source, encoding="utf-8")
    if finished.returncode == 0:
        return "SURVIVED"
    failures = [line for line in finished.stdout.splitlines() if line.startswith("FAILED tests/")]
    if finished.returncode != FAILED or not failures or any(e in failures[0] for e in BROKEN):
        return "BROKEN: " + finished.stdout[-500:]
    return f"caught by {failures[0].removeprefix('FAILED ').partition(' - ')[0]}"


def main() -> int:
    """Return 0 if every mistake is caught, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mistakes")
    only = parser.parse_args().only
    left = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copied(Path(name))
        for number, mutant in enumerate(load(), start=1):
            if only and number not in only:
                continue
            try:
                became = verdict(Path(name), mutant)
            except DoesNotApplyError as error:
                became = f"DOES NOT APPLY: {error}"
            left += not became.startswith("caught")
            print(f"{number:3} {mutant.mistake} {became}", flush=True)
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
