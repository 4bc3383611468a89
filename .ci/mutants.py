"""Seed mistakes into a copy of the repository, one at a time, and check that tests catch them.

python .ci/mutants.py [--only N ...] [--jobs 2] [--all-tests]

`mutants.toml` lists the mistakes, each with the test files that catch it. Every mistake is one
changed line in a copy of the tree, so the checkout stays as it is. The unchanged copy must pass the
same tests first. The exit status is 1 if a mistake survives, or no longer fits the code.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
# folders of the repository that the installed package `securecluster` contains
MAPPED = ("protocols", "attacks")
# what neither the package nor a test reads
LEFT_OUT = (
    ".git",
    ".hypothesis",
    ".venv",
    ".*_cache",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
)
RUNS = "runs"  # at the top: runs that somebody left there
# errors of code that does not run at all: any test would catch it, so it proves nothing
BROKEN = ("ImportError", "IndentationError", "ModuleNotFoundError", "NameError", "SyntaxError")
# exit status of pytest if a test failed; others are errors of its use or of the collection
FAILED = 1
# lines of the output, if pytest reports no failed test
TAIL = 15
# The test of the table reads the mutated text, and would catch every mutant.
ALL_TESTS = ["tests", "--ignore=tests/test_mutants.py"]
# time limit of all tests on the unchanged copy, in limits of one mutant's
UNCHANGED = 10


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that are not copied."""
    left = set(shutil.ignore_patterns(*LEFT_OUT)(folder, names))
    if Path(folder) == ROOT:
        left.add(RUNS)
    return left


class DoesNotApplyError(Exception):
    """A mistake that does not fit the code any more."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: one changed line.

    Args:
        number: position in the table, from 1.
        mistake: what is wrong, in a sentence.
        file: path from the repository root.
        old: text of the right code, which occurs once in the file.
        new: text of the wrong code.
        tests: test files that catch it.
        select: expression of pytest's -k; empty for all tests of the files.
    """

    number: int
    mistake: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    select: str = ""

    def apply(self, source: str) -> str:
        """Return a file's text with the mistake.

        Args:
            source: text of the file.

        Raises:
            DoesNotApplyError: the old text does not occur once, more than one line changes, or the
                result does not compile or is the same program.
        """
        occurrences = source.count(self.old)
        if occurrences != 1:
            raise DoesNotApplyError(f"its old text occurs {occurrences} times in {self.file}")
        mutated = source.replace(self.old, self.new)
        if _changed_lines(self.old, self.new) != 1:
            raise DoesNotApplyError("it does not change exactly one line")
        if self.old.split() == self.new.split():
            raise DoesNotApplyError("it changes nothing but the layout")
        try:
            ast.parse(mutated)
        except SyntaxError as error:
            raise DoesNotApplyError(f"its new text does not compile: {error}") from None
        return mutated

    @property
    def pytest_arguments(self) -> list[str]:
        """Return the tests that catch it, as pytest takes them."""
        arguments = list(self.tests)
        if self.select:
            arguments += ["-k", self.select]
        return arguments


@dataclass(frozen=True)
class Outcome:
    """Result of a test run.

    Args:
        status: exit status of pytest; None if it ran past the time limit.
        report: the failed test and its error, or the end of the output.
        seconds: wall time.
    """

    status: int | None
    report: str
    seconds: float

    @property
    def broken(self) -> bool:
        """Return True if code did not run, rather than give a wrong result."""
        named = self.report.startswith("tests/")  # else no test failed, but pytest itself
        if self.status not in (0, None) and not (self.status == FAILED and named):
            return True
        return any(error in self.report for error in BROKEN)


def load() -> list[Mutant]:
    """Return the mutants of the table."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    mutants = []
    for number, entry in enumerate(table["mutant"], start=1):
        entry["tests"] = tuple(entry["tests"])
        mutants.append(Mutant(number=number, **entry))
    return mutants


def _changed_lines(before: str, after: str) -> int:
    """Return how many lines differ between the lines that two texts have in common at their ends.

    Args:
        before: some lines.
        after: the same lines, some of them changed, added or removed.
    """
    old_lines = before.splitlines()
    new_lines = after.splitlines()
    for end in (0, -1):
        while old_lines and new_lines and old_lines[end] == new_lines[end]:
            old_lines.pop(end)
            new_lines.pop(end)
    return max(len(old_lines), len(new_lines))


class Copy:
    """Copy of the repository that tests import instead of the checkout.

    Args:
        folder: the copy's folder, which does not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=_left_out, dirs_exist_ok=True)
        # An editable installation maps these folders of the checkout into the package. Here they
        # are where a plain import finds them.
        for name in MAPPED:
            (folder / "securecluster" / name).symlink_to(folder / name, target_is_directory=True)
        # Bytecode that is checked by the source's hash: by its time and size, a mistake of the same
        # length that is made within a second would go unnoticed.
        compileall.compile_dir(
            folder, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._check_imports()

    def _check_imports(self) -> None:
        """Exit unless a process in this copy imports the copy's modules."""
        modules = ["securecluster", *(f"securecluster.{name}" for name in MAPPED), "benchmarks"]
        code = f"import {', '.join(modules)}\n"
        for module in modules:
            code += f"print({module}.__file__)\n"
        printed = self._python("-c", code, limit=120).stdout.split()
        folders = ("securecluster", *MAPPED, "benchmarks")
        expected = [self.folder / name / "__init__.py" for name in folders]
        imported = [Path(file).resolve() for file in printed]
        if imported != [file.resolve() for file in expected]:
            sys.exit(f"the tests would import {imported}, and not the copy in {self.folder}")

    def _python(self, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )

    def test(self, arguments: Sequence[str], limit: float) -> Outcome:
        """Run tests until the first failure.

        Args:
            arguments: test files and options of pytest.
            limit: time limit in seconds.
        """
        begin = time.monotonic()
        options = ["-x", "-q", "-n", "0", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
        try:
            finished = self._python("-m", "pytest", *options, *arguments, limit=limit)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"ran past {limit:.0f} s", time.monotonic() - begin)
        report = _failure(finished.stdout)
        return Outcome(finished.returncode, report, time.monotonic() - begin)

    def test_with(self, mutant: Mutant, arguments: Sequence[str], limit: float) -> Outcome:
        """Run tests with a mistake, which is undone afterwards.

        Args:
            mutant: the mistake.
            arguments: test files and options of pytest.
            limit: time limit in seconds.

        Raises:
            DoesNotApplyError: the mistake does not fit the code.
        """
        path = self.folder / mutant.file
        source = path.read_text(encoding="utf-8")
        mutated = mutant.apply(source)
        path.write_text(mutated, encoding="utf-8")
        try:
            return self.test(arguments, limit)
        finally:
            path.write_text(source, encoding="utf-8")


def _failure(output: str) -> str:
    """Return the failed test and its error from pytest's output, or the output's last lines."""
    for line in output.splitlines():
        match = re.match(r"(FAILED|ERROR) (tests/.*)", line)
        if match:
            return match[2]
    return "\n".join(output.splitlines()[-TAIL:])


def _verdict(outcome: Outcome) -> str:
    """Return in a word what became of a mistake."""
    if outcome.status is None:
        return "TIME LIMIT"
    if outcome.status == 0:
        return "SURVIVED"
    if outcome.broken:
        return "BROKEN"
    return "caught"


def _line(mutant: Mutant, verdict: str, detail: str, seconds: float) -> str:
    """Return the line that is printed of a mutant."""
    return f"{mutant.number:3} {verdict} ({seconds:.0f} s): {mutant.mistake} [{detail}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time")
    parser.add_argument("--all-tests", action="store_true", help="run all tests on each mutant")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one test run")
    return parser.parse_args()


def _unchanged_runs(mutants: Sequence[Mutant], all_tests: bool) -> list[list[str]]:
    """Return the arguments of few runs of pytest with all tests that the mutants name.

    Tests of whole files are in one run, selected ones in another.

    Args:
        mutants: the mutants.
        all_tests: True to run all tests.
    """
    if all_tests:
        return [ALL_TESTS]
    whole = {test for mutant in mutants if not mutant.select for test in mutant.tests}
    others = {test for mutant in mutants for test in mutant.tests} - whole
    words = {mutant.select for mutant in mutants if mutant.select}
    runs = []
    if whole:
        runs.append(sorted(whole))
    if others:
        runs.append([*sorted(others), "-k", " or ".join(sorted(words))])
    return runs


class Trials:
    """Test runs in several copies at a time.

    Args:
        folder: an empty folder for the copies.
        jobs: number of copies.
        all_tests: True to run all tests on each mutant.
        limit: time limit of a run, in seconds.
    """

    def __init__(self, folder: Path, jobs: int, all_tests: bool, limit: float) -> None:
        self._all_tests = all_tests
        self._limit = limit
        self._pool = ThreadPoolExecutor(jobs)
        self._idle: Queue[Copy] = Queue()
        for job in range(jobs):
            self._idle.put(Copy(folder / str(job)))

    def problems(self, mutants: Sequence[Mutant]) -> list[str]:
        """Return what fails in copies without any mistake, one entry a run."""
        runs = _unchanged_runs(mutants, self._all_tests)
        return [problem for problem in self._pool.map(self._problem, runs) if problem]

    def caught(self, mutants: Sequence[Mutant]) -> int:
        """Print a line for each mutant, and return how many are caught."""
        return sum(self._pool.map(self._is_caught, mutants))

    def _problem(self, arguments: list[str]) -> str:
        copy = self._idle.get()
        try:
            outcome = copy.test(arguments, UNCHANGED * self._limit)
        finally:
            self._idle.put(copy)
        if outcome.status == 0:
            return ""
        return outcome.report

    def _is_caught(self, mutant: Mutant) -> bool:
        arguments = ALL_TESTS if self._all_tests else mutant.pytest_arguments
        copy = self._idle.get()
        try:
            outcome = copy.test_with(mutant, arguments, self._limit)
            verdict = _verdict(outcome)
            line = _line(mutant, verdict, outcome.report, outcome.seconds)
        except DoesNotApplyError as error:
            verdict = "DOES NOT APPLY"
            line = _line(mutant, verdict, str(error), 0)
        finally:
            self._idle.put(copy)
        print(line, flush=True)
        return verdict == "caught"


def main() -> int:
    """Return 0 if every mutant is caught, else 1."""
    asked = _arguments()
    mutants = [mutant for mutant in load() if not asked.only or mutant.number in asked.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trials = Trials(Path(folder), asked.jobs, asked.all_tests, asked.limit)
        problems = trials.problems(mutants)
        if problems:
            print("tests fail without any mistake:", *problems, sep="\n")
            return 1
        caught = trials.caught(mutants)
    print(f"{caught} of {len(mutants)} mutants caught")
    return int(caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
