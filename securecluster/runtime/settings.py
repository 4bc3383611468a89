"""Settings that all protocols share: device, precision, dropout and transcript of a run.

Threads and device are among them since float sums round differently with others: resume and replay
use the recorded ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from securecluster.core.devices import DEVICES
from securecluster.core.validation import IN_PYTHON, Options
from securecluster.errors import UsageError
from securecluster.messaging.transcript import MODES

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

MOST_THREADS = 256  # also on machines with fewer cores
DTYPES = ("float32", "float64")
RAY_LEFT = (
    "runs took about twice as long on two of Ray's workers as in one process, where clients train "
    "in several --threads; sweep and compare carry out several runs at the same time (--jobs), and "
    "nodes or Flower a run on many machines"
)


@dataclass(frozen=True)
class Settings(Options):
    """Device, precision, dropout and transcript of a run, which do not depend on its protocol."""

    LEFT = MappingProxyType({"engine": RAY_LEFT, "workers": RAY_LEFT})

    # The strings below the fields are the help texts of the command line.
    device: str = "auto"
    """auto, cpu or cuda; auto is the GPU where there is one"""
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice"""
    dtype: Annotated[str, IN_PYTHON] = "float32"
    """numbers of models and frames: float32 or float64"""
    dropout: float = 0.0
    """chance that a client does not reply to a call, in [0, 1)"""
    target: Annotated[float, IN_PYTHON] = 0.99
    """test accuracy: the history says what share of the clients reaches it"""
    transcript: str = "sizes"
    """what is kept of the frames: none, sizes or full; on the command line also auto, full where
    the run sends less than 256 MB
    """
    keys_from_seed: bool = False
    """derive keys, masks and noise from the seed, so that runs repeat bit for bit on processors of
    one kind (with AVX-512 and without it noise differs); whoever knows or guesses the seed can
    undo them, so for tests and for repeating published numbers only
    """


def check_threads(threads: int) -> None:
    """Raise UsageError for a number of CPU threads that no machine has.

    Args:
        threads: number of threads; torch would crash on a very large one.
    """
    maximum = max(MOST_THREADS, os.cpu_count() or 1)
    if not isinstance(threads, Integral) or not 0 <= threads <= maximum:
        raise UsageError(
            f"--threads is a whole number from 0 to {maximum}, not {threads!r}: 0 leaves torch's "
            "own choice"
        )


def check_settings(settings: Settings, federation: Federation) -> None:
    """Raise UsageError for settings or a federation that no protocol can run with.

    Args:
        settings: how the run is to be carried out.
        federation: the clients' data.
    """
    from securecluster.data.federation import fingerprint

    check_values(settings)
    # Identical data usually mean that one shard was given to all clients by mistake.
    if len({fingerprint(shard) for shard in federation.shards}) == 1:
        raise UsageError(
            f"all {len(federation)} clients hold identical data, so there is nothing to cluster: "
            "check how the clients were made"
        )


def check_values(settings: Settings) -> None:
    """Raise UsageError for settings that no run can have, whatever its federation.

    Args:
        settings: how the run is to be carried out.
    """
    _check_choice("device", settings.device, DEVICES)
    _check_choice("dtype", settings.dtype, DTYPES)
    _check_choice("transcript", settings.transcript, MODES)
    check_threads(settings.threads)
    _check_shares(settings)
    if not isinstance(settings.keys_from_seed, bool):
        raise UsageError(
            f"keys_from_seed = {settings.keys_from_seed!r} is a choice: give True or False"
        )


def _check_choice(name: str, value: str, options: Sequence[str]) -> None:
    """Raise UsageError for a value that is not one of the options of a setting."""
    if value not in options:
        listed = ", ".join(options)
        raise UsageError(f"unknown {name} {value!r}: choose one of {listed}")


def _check_shares(settings: Settings) -> None:
    """Raise UsageError unless dropout and target are numbers in their ranges."""
    dropout = settings.dropout
    target = settings.target
    numeric = isinstance(dropout, Real) and isinstance(target, Real)
    # a dropout of 1 would leave no reply to any call
    if not numeric or not 0 <= dropout < 1 or not 0 <= target <= 1:
        raise UsageError("dropout lies in [0, 1), and target in [0, 1]: give numbers")
