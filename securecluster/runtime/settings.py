"""How a run is carried out, as far as every protocol shares it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral, Real

from securecluster.data import Federation
from securecluster.data.federation import fingerprint
from securecluster.errors import UsageError
from securecluster.messaging.transcript import MODES

MOST_THREADS = 256
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Settings:
    """Where and how a run is carried out."""

    device: str = "auto"
    """auto, cpu or cuda; auto is the GPU where there is one"""
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice"""
    dtype: str = "float32"
    """numbers of models and frames: float32 or float64"""
    dropout: float = 0.0
    """chance that a client does not reply to a call, in [0, 1)"""
    target: float = 0.99
    """test accuracy: the history says what share of the clients reaches it"""
    transcript: str = "sizes"
    """what is kept of the frames: none, sizes or full; on the command line also auto, full where
    the run sends less than 256 MB
    """


def check_threads(threads: int) -> None:
    """Raise UsageError for a number of CPU threads that no machine has; torch would crash on it."""
    most = max(MOST_THREADS, os.cpu_count() or 1)
    if not isinstance(threads, Integral) or not 0 <= threads <= most:
        raise UsageError(
            f"threads is a whole number from 0 to {most}, not {threads!r}: 0 leaves torch's own "
            "choice"
        )


def check_settings(settings: Settings, federation: Federation) -> None:
    """Raise UsageError for settings or a federation no protocol can run with."""
    for what, value, known in (
        ("dtype", settings.dtype, DTYPES),
        ("transcript", settings.transcript, MODES),
    ):
        if value not in known:
            raise UsageError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
    check_threads(settings.threads)
    real = all(isinstance(value, Real) for value in (settings.dropout, settings.target))
    if not (real and 0 <= settings.dropout < 1 and 0 <= settings.target <= 1):
        raise UsageError("dropout lies in [0, 1), and target in [0, 1]: give numbers")
    if len({fingerprint(s) for s in federation.shards}) == 1:
        raise UsageError(
            f"all {len(federation)} clients hold identical data, so there is nothing to cluster: "
            "check how the clients were made"
        )
