"""What can go wrong, by name. Every message is one sentence that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SecureClusterError(Exception):
    """Base of all errors a user can mend; the command line prints it as one sentence and exits with
    2.
    """


class UsageError(SecureClusterError):
    """An argument, a name or a combination that cannot work."""


class SecureClusterWarning(UserWarning):
    """Something that works and is probably not meant; the command line prints it as a note."""


class FrameError(SecureClusterError):
    """A frame that does not parse, is not meant for this party, or was built from another
    configuration.
    """


class UnforeseenError(FrameError):
    """A frame that made its recipient fail in a way that nobody has foreseen."""


class PolicyError(SecureClusterError):
    """A release that the client's own policy forbids."""


class UpdateError(SecureClusterError):
    """A reply with a value that is not a finite number."""


class RunFolderError(SecureClusterError):
    """A run folder that cannot be read, written, locked or resumed."""


class ReplayError(SecureClusterError):
    """A server whose requests or result differ from the recorded transcript."""


class OutputError(SecureClusterError):
    """A terminal, pipe or file that what is printed cannot be written to."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for a name that is in no registry, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(names)}")
