"""Exceptions and warnings of the package.

Every message is one sentence that names the fault and says how to correct it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# an option as it is typed, with the value that may follow; a whole command stays as it is
OPTION = re.compile(
    r"securecluster [a-z][^;]*"
    r"|(?<![\w-])--(?P<name>[a-z][a-z\d-]*)"
    r"(?: (?P<numbers>\d[\d.]*(?: \d[\d.]*)*)\b| (?P<word>[A-Z]+\b|[a-z\d-]+(?=[),;:]|$)))?"
)
# what some options are called in Python
IN_PYTHON = {"out": "folder", "force": "force=True"}
MOST_QUOTED = 80  # characters of a value in a sentence
_typed = False  # whether sentences are for the command line


@contextmanager
def on_command_line() -> Iterator[None]:
    """Write options as they are typed, in the texts of errors that are read in this context."""
    global _typed
    before = _typed
    _typed = True
    try:
        yield
    finally:
        _typed = before


def in_python(text: str) -> str:
    """Return a sentence in which options have their names and values in Python.

    Args:
        text: a sentence in which an option is written as it is typed, `--batch-size 20`.
    """
    return OPTION.sub(_as_keyword, text)


def _as_keyword(match: re.Match[str]) -> str:
    name, numbers, word = match.group("name", "numbers", "word")
    if name is None:  # a command
        return match.group()
    keyword = IN_PYTHON.get(name, name.replace("-", "_"))
    if numbers is not None:
        values = numbers.split()
        return f"{keyword}={values[0]}" if len(values) == 1 else f"{keyword}=[{', '.join(values)}]"
    if word is not None:
        return f"{keyword}={word}" if word.isupper() else f"{keyword}={word!r}"
    return keyword


class _Sentence:
    """Base of errors and warnings, whose options are written as they are where one reads them."""

    def __str__(self) -> str:
        """Return the sentence."""
        text = super().__str__()
        return text if _typed else in_python(text)


class SecureClusterError(_Sentence, Exception):
    """Base class of all errors that a user can correct.

    The command line prints the message as one sentence and exits with status 2.
    """


class UsageError(SecureClusterError):
    """An invalid argument, name or combination of options."""


class NoOutputsError(UsageError):
    """Outputs of a model are asked for, of which its user gave no function."""


class SecureClusterWarning(_Sentence, UserWarning):
    """A valid input that is probably not intended; the command line prints it as a note."""


class FrameError(SecureClusterError):
    """An invalid frame: it does not parse, or is not meant for this party."""


class UnknownRunError(FrameError):
    """A frame of a run, or of a configuration, that its recipient has not agreed to."""


class UnforeseenError(FrameError):
    """A frame that made its recipient fail with an exception that no check anticipates."""


class PolicyError(SecureClusterError):
    """A request that a rule of the protocol forbids, by which clients protect themselves."""


class OwnerPolicyError(PolicyError):
    """A run or a release that the policy of the client's owner forbids."""


class RevokedRunError(OwnerPolicyError):
    """A request of a run that the client's owner has taken it out of."""


class ProposalError(PolicyError):
    """A proposed run that is not the one of the client's own protocol object and data."""


class StaleError(PolicyError):
    """A request about what its recipient has moved on from."""


class LateError(PolicyError):
    """A request whose deadline has passed."""


class BudgetError(PolicyError):
    """A release that would cost more than a client's owner allows over all runs."""


class TargetError(PolicyError):
    """A release by which a run would cost more than its `target_epsilon`."""


class RefusedError(SecureClusterError):
    """A request that its recipient refused.

    Args:
        message: one sentence, made of the code.
        code: the reason, of those that cross the wire; the recipient's own text stays with it.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class UpdateError(SecureClusterError):
    """A reply that contains a value other than a finite number, or too few replies to go on."""


class RunFolderError(SecureClusterError):
    """A run folder that cannot be read, written, locked or resumed."""


class ReplayError(SecureClusterError):
    """A server whose requests or result differ from the recorded transcript."""


class OutputError(SecureClusterError):
    """A terminal, pipe or file to which the output cannot be written."""


def text_of(error: BaseException) -> str:
    """Return the text of an exception of somebody else's; empty where it has none.

    Args:
        error: of any class, whose own code makes the text and may fail.
    """
    try:
        return str(error)
    except Exception:  # whatever that code raises
        return ""


def quoted(value: object) -> str:
    """Return a value as sentences quote it: as Python writes it, and shortened.

    Args:
        value: of any type and length, as a user gave it.
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    if len(text) <= MOST_QUOTED:
        return text
    return f"{text[: MOST_QUOTED // 2]}…{text[-MOST_QUOTED // 4 :]}"


def unknown(category: str, name: object, choices: Iterable[str]) -> UsageError:
    """Return the error for a name that is not registered, with the closest valid name as a hint.

    Args:
        category: what the name stands for, such as "metric"; it begins the message.
        name: the invalid name.
        choices: the valid names.
    """
    names = sorted(choices)
    given = str(name)[:MOST_QUOTED] if isinstance(name, str) else ""
    # capitals and small letters count as the same, and dashes before an option for nothing
    by_letters = {choice.lower().lstrip("-"): choice for choice in names}
    closest = difflib.get_close_matches(given.lower().lstrip("-–—"), by_letters, n=1)
    hint = ""
    if closest:
        hint = f"did you mean {by_letters[closest[0]]!r}? "
    return UsageError(f"unknown {category} {quoted(name)}: {hint}choose one of {', '.join(names)}")
