"""A process of the command line: how it starts, and how it stops in words.

A signal and an output that cannot be written stop it.

Imports nothing heavy, so that Ctrl-C is answered while everything else is still being imported.
"""

from __future__ import annotations

import codecs
import gc
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
NO_READER = 141  # exit code of a process whose reader went away: 128 + SIGPIPE
UNWRITABLE = 2  # exit code of a process that could not print
# New objects after which Python looks for unreachable ones. With its own 700 it would search all
# that torch and matplotlib load again and again, for a tenth of the time of a short run.
COLLECTED_AFTER = 10_000


class Stopped(KeyboardInterrupt):
    """A signal or a closed output stopped the process.

    It is a KeyboardInterrupt, so that `except Exception` does not catch it.

    Args:
        code: the exit code, 128 + the signal's number.
    """

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def prepare_process() -> None:
    """Set up signals, outputs and garbage collection of the console script's process.

    SIGTERM raises `Stopped`, and characters that an output cannot encode are replaced by words.
    """
    gc.set_threshold(COLLECTED_AFTER)
    signal.signal(signal.SIGTERM, _on_signal)
    codecs.register_error("securecluster", _readable)
    for stream in (sys.stdout, sys.stderr):
        # a stream may be None, or replaced by an object of another class
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="securecluster")


@contextmanager
def lost_by_nobody() -> Iterator[None]:
    """Stop for a signal in this context at its end at the latest.

    Python drops what a handler raises while it cleans up after an import.

    Raises:
        Stopped: a signal arrived.
    """
    arrived: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        _on_signal(number, frame)

    # a process in the background may ignore them
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise Stopped(128 + arrived[0])


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise Stopped(128 + number)


def _readable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an output cannot encode by words; a codec error handler.

    Args:
        error: raised by the encoder.

    Returns:
        The replacement, and the position at which the encoder continues.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    words = [READABLE.get(character, "?") for character in text]
    return "".join(words), error.end


def flush() -> int:
    """Write out what was printed.

    Returns:
        0, or the exit code 141 where nobody reads the output any more, or 2 where it cannot be
        written.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before the process began
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            _redirect_to_null(stream.fileno())
            code = NO_READER
        except OSError as error:
            _redirect_to_null(stream.fileno())
            code = UNWRITABLE
            # a full standard error cannot say that it is full
            if stream is sys.stdout:
                print(f"securecluster: {_unwritten(error)}", file=sys.stderr)
    return code


@contextmanager
def output() -> Iterator[None]:
    """Print within this context, which turns failures of the output into errors of this package.

    Raises:
        Stopped: nobody reads the output any more.
        OutputError: the output cannot be written, such as to a full disk.
    """
    try:
        yield
        # here and not at the exit of the process, where nothing could be said any more
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _redirect_to_null(sys.stdout.fileno())
        raise Stopped(NO_READER) from None
    except SystemExit as stop:
        if stop.code != 1:  # of --help, or of options that do not parse
            raise
        raise Stopped(NO_READER) from None  # rich exits with 1 on a broken pipe
    except OSError as error:
        _redirect_to_null(sys.stdout.fileno())
        raise OutputError(_unwritten(error)) from None


def _unwritten(error: OSError) -> str:
    return f"cannot print ({error.strerror}): send the output elsewhere"


def _redirect_to_null(descriptor: int) -> None:
    """Redirect a stream that failed to the null device.

    Args:
        descriptor: file descriptor of the stream.
    """
    # the interpreter flushes streams at its exit, and would fail again
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
