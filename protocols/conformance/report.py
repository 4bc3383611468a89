"""Results of checks: one sentence each, and the place in an author's code where it failed."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["passed", "failed", "not applicable"]
SIGNS: dict[Outcome, str] = {"passed": "✓", "failed": "✗", "not applicable": "–"}
# rooms whose code an author calls, and does not write
FRAMEWORK = ("securecluster.protocols.common", "securecluster.protocols.conformance")
LONGEST = 400  # characters of an unexpected exception's text


class ConformanceError(AssertionError):
    """A protocol does not keep what every protocol must; the text says what to do."""


class NotApplicableError(Exception):
    """A check has nothing to compare in a protocol; the text is the reason."""


@dataclass(frozen=True)
class Result:
    """Result of one check.

    Args:
        name: of the check.
        description: what it compares, in one line.
        outcome: passed, failed or not applicable.
        sentence: what to do after a failure, or why the check is not applicable; empty if it
            passed.
    """

    name: str
    description: str
    outcome: Outcome
    sentence: str = ""

    def __str__(self) -> str:
        line = f"{SIGNS[self.outcome]} {self.name}: {self.description}"
        return f"{line} — {self.sentence}" if self.sentence else line


@dataclass(frozen=True)
class Report:
    """Results of all checks of a protocol.

    Args:
        protocol: its class's name.
        results: one for each check, in order.
    """

    protocol: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Return whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Result, ...]:
        """Return the results of checks that failed."""
        return tuple(result for result in self.results if result.outcome == "failed")

    def __getitem__(self, name: str) -> Result:
        """Return the result of a check.

        Args:
            name: of the check.

        Raises:
            KeyError: no such check was run.
        """
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(name)

    @property
    def closing(self) -> str:
        """Return a line with the number of results of each kind."""
        counts = [sum(r.outcome == outcome for r in self.results) for outcome in SIGNS]
        passed, failed, skipped = counts
        return (
            f"{self.protocol}: {passed} of {len(self.results)} checks passed, {failed} failed, "
            f"{skipped} not applicable"
        )

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), self.closing])

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"passed": self.passed, **asdict(self)}

    def require(self) -> None:
        """Raise an error unless every applicable check passed.

        Raises:
            ConformanceError: names the checks that failed, and what to do.
        """
        if self.failures:
            raise ConformanceError("\n".join(map(str, self.failures)))


def outcome_of(
    name: str, description: str, check: Callable[[], None], author: Iterable[Path]
) -> Result:
    """Run a check to its end, whatever it raises, and return its result.

    Args:
        name: of the check.
        description: in one line.
        check: raises `ConformanceError`, `NotApplicableError` or anything else.
        author: files of the protocol's author.
    """
    try:
        check()
    except ConformanceError as error:
        return Result(name, description, "failed", str(error))
    except NotApplicableError as reason:
        return Result(name, description, "not applicable", str(reason))
    # Ctrl-C ends everything; any other exception is the author's, or shows a mistake of theirs.
    except Exception as error:
        return Result(name, description, "failed", told(error, author))
    return Result(name, description, "passed")


def told(error: BaseException, author: Iterable[Path] = ()) -> str:
    """Return an exception's type, its text, and where in the author's code it arose, in one line.

    Args:
        error: that was caught.
        author: files of the protocol's author.
    """
    text = " ".join(str(error).split())
    if len(text) > LONGEST:
        text = text[:LONGEST] + "…"
    sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    origin = _place(error, frozenset(author))
    return f"{sentence} ({origin})" if origin else sentence


def author_files(made: Any) -> frozenset[Path]:
    """Return the files of a protocol's classes, and of its clients, that the framework lacks.

    Args:
        made: the protocol.
    """
    files = set()
    for base in (*type(made).__mro__, *getattr(made, "client", object).__mro__):
        module = sys.modules.get(base.__module__)
        path = getattr(module, "__file__", None)
        if path and not base.__module__.startswith(FRAMEWORK) and not inspect.isbuiltin(base):
            files.add(Path(path))
    return frozenset(files)


def _place(error: BaseException, author: frozenset[Path]) -> str:
    """Return "file:line" of the innermost frame in the author's code; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if Path(frame.filename) in author:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""
