"""Secret of a run, from which its keys, masks and noise follow.

The seed of a run is for what anybody may know: data, models, who is asked. It may be small, stands
in configurations, and can be guessed from their hash in every frame. What must stay secret is
therefore drawn from a secret of the run's own, which a run folder keeps in one file for its owner.

It has 128 bits, drawn as the run starts and stored before anything leaves. Resume, replay,
newcomers and audits read it there, and refuse a folder without it. `Settings.keys_from_seed`
derives it from the seed, for golden runs and published numbers, and every output says so. It is a
setting and no environment variable, which somebody could leave set.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import warnings
from pathlib import Path

from securecluster.core import atomic_files
from securecluster.core.randomness import Randomness
from securecluster.errors import RunFolderError, SecureClusterWarning

FILE = "secret.key"
OWN = atomic_files.Own((atomic_files.MARKER,), re.compile(re.escape(FILE)))
LENGTH = 16  # bytes
KEY_LENGTH = 32  # bytes of a deployed server's key, which its folder has in this place
OTHERS = 0o077  # bits of a file's mode that let others than its owner in
CHECK = 8  # bytes of the digest by which a damaged file is found
# what every output of a run with `keys_from_seed` says
FROM_SEED = (
    "keys, masks and noise follow from the run's seed (--keys-from-seed): whoever knows or guesses "
    "it undoes them, so that none of them protects anything, and no epsilon holds"
)


def drawn() -> bytes:
    """Return a new secret from the operating system, 16 bytes."""
    return secrets.token_bytes(LENGTH)


def randomness(secret: bytes) -> Randomness:
    """Return the secret random streams of a run.

    Args:
        secret: of the run.
    """
    return Randomness(int.from_bytes(secret, "big"))


def read(folder: Path) -> bytes | None:
    """Return the secret in a folder; None where there is none.

    Args:
        folder: of a run, or one that `save` wrote.

    A file that others than its owner can read, such as a copy, is read with a warning.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    if os.name == "posix" and path.stat().st_mode & OTHERS:
        warnings.warn(
            f"{path} can be read by others than its owner, who then have all keys and noise of the "
            f"run: chmod 600 {path}",
            SecureClusterWarning,
            stacklevel=2,
        )
    data = atomic_files.read(path)
    secret = data[:-CHECK]
    if len(secret) not in (LENGTH, KEY_LENGTH) or not hmac.compare_digest(data, _encoded(secret)):
        raise RunFolderError(
            f"{path} is damaged: restore it from where it was copied, or start the run anew"
        )
    return secret


def missing(folder: Path | None) -> RunFolderError:
    """Return the error of a run that cannot go on or be repeated without its secret.

    Args:
        folder: of the run; None where it is not known.
    """
    subject = "this run" if folder is None else str(folder)
    return RunFolderError(
        f"{subject} is without the secret from which its keys and noise follow: restore {FILE} in "
        "its folder, or start the run anew"
    )


def write(folder: Path, secret: bytes | None) -> None:
    """Write the secret of a run to a folder, readable by its owner only.

    Args:
        folder: which exists.
        secret: of the run; None removes that of an earlier one.
    """
    if secret is None:
        atomic_files.remove(folder, FILE, OWN)
        return
    # on the disk before anything that follows from it can leave
    data = _encoded(secret)
    atomic_files.write_atomic(folder / FILE, data, atomic_files.OWNER, durable=True)


def _encoded(secret: bytes) -> bytes:
    """Return the content of the file: the secret, and a digest by which damage is found."""
    return secret + hmac.digest(secret, b"securecluster run secret v1", "sha256")[:CHECK]
