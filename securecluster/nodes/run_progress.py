"""What a node remembers of a run beside its state: how far it came, and what it told outside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from securecluster.core import atomic_files
from securecluster.core.serialization import plain, structured
from securecluster.errors import RunFolderError
from securecluster.nodes.policy import Policy

NAME = "progress.json"
CHECKS = "1"  # changes with what a policy is compared with


@dataclass(frozen=True)
class Progress:
    """Progress of a node in a run.

    Args:
        round: the latest that it has answered a frame of.
        allowed: digest of the policy that the run was last compared with.
        told: whether the node has told its score.
        score: that it told; None for a client without test samples.
    """

    round: int = 0
    allowed: str = ""
    told: bool = False
    score: float | None = None


def read(folder: Path) -> Progress:
    """Return how far a node came in the run of a folder.

    Args:
        folder: of the run.

    Raises:
        RunFolderError: the file was changed.
    """
    path = folder / NAME
    if not path.exists():
        return Progress()
    try:
        return structured(json.loads(atomic_files.read(path)), Progress)
    except (ValueError, TypeError, RecursionError):
        raise RunFolderError(f"{path} is not what the node wrote: restore it from a copy") from None


def write(folder: Path, progress: Progress, durable: bool) -> None:
    """Write how far a node came, so that it is on the disk when this returns.

    Args:
        folder: of the run.
        progress: to write.
        durable: it outlives a power cut.
    """
    data = json.dumps(plain(progress), allow_nan=False).encode()
    atomic_files.write_atomic(folder / NAME, data, atomic_files.OWNER, durable=durable)


def digest_of(policy: Policy) -> str:
    """Return what tells a policy from every other one.

    Args:
        policy: of a node's owner.
    """
    text = json.dumps([CHECKS, asdict(policy)], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()
