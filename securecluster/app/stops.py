"""Stopping a process in words: signals, and outputs that cannot be written.

Imports nothing heavy, so that Ctrl-C is answered while everything else is still being imported.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from securecluster.errors import OutputError

READABLE = {
    "‖": "||", "σ": "sigma", "ε": "epsilon", "δ": "delta", "λ": "lambda", "γ": "gamma",
    "θ": "theta", "α": "alpha", "β": "beta", "Δ": "Delta", "Σ": "Sum", "Φ": "Phi", "ω": "omega",
    "∞": "infinite", "√": "sqrt", "∈": "in", "–": "-", "−": "-", "…": "...", "·": "*", "×": "x",
    "±": "+-", "≤": "<=", "≥": ">=", "←": "<-", "→": "->", "⁻": "^-", "¹": "1", "²": "^2",
    "ᵀ": "^T", "½": "1/2", "₀": "_0", "ᵢ": "_i", "é": "e", "’": "'", "“": '"', "”": '"',
}  # fmt: skip


class Stopped(KeyboardInterrupt):
    """A signal or a closed output stopped the process.

    Args:
        code: the exit code, 128 and the signal's number.
    """

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def prepare_process() -> None:
    """Make the console script of this process stop in words, and print on every terminal."""
    signal.signal(signal.SIGTERM, _on_signal)
    codecs.register_error("securecluster", _readable)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="securecluster")


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise Stopped(128 + number)


def _readable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an output cannot hold by words; a codec error handler."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(READABLE.get(character, "?") for character in text), error.end


def flush() -> int:
    """Write out what was printed.

    Returns:
        0, 141 where nobody reads the output any more, or 2 where it cannot be written.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before the process began
            continue
        try:
            stream.flush()
        except OSError as error:
            _give_up(stream.fileno())
            code = 141 if isinstance(error, BrokenPipeError) else 2
            if code == 2 and stream is sys.stdout:
                print(f"securecluster: {_unwritten(error)}", file=sys.stderr)
    return code


@contextmanager
def output() -> Iterator[None]:
    """Print within this.

    Raises:
        Stopped: nobody reads the output any more.
        OutputError: it cannot be written, such as to a full disk.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _give_up(sys.stdout.fileno())
        raise Stopped(141) from None
    except SystemExit as stop:
        if stop.code != 1:  # of --help, or of options that do not parse
            raise
        raise Stopped(141) from None  # rich's word for a broken pipe
    except OSError as error:
        _give_up(sys.stdout.fileno())
        raise OutputError(_unwritten(error)) from None


def _unwritten(error: OSError) -> str:
    return f"cannot print ({error.strerror}): send the output elsewhere"


def _give_up(descriptor: int) -> None:
    """Point a stream at nothing, so that the interpreter does not trip over it at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
