"""A party of runs on many machines that is no server: a client's node, or the key authority.

Its folder, which only its owner can read, has a folder for each run that it agreed to. It answers
bytes with bytes, one message at a time, and what it answers is on its disk before the reply leaves.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from securecluster.core import atomic_files
from securecluster.errors import FrameError, RunFolderError, UsageError
from securecluster.messaging import refusals
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.runs.method import Method
from securecluster.runs.policy import Policy
from securecluster.runs.proposal import Proposal
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.refusals import answered

AGREED = "agreed.json"
DRAWS, NAMES = "draws", "names"  # an entry of this file beside the configuration's
STATE = "state.safetensors"
LOCK = "lock"
SECONDS_FOR_LOCK = 600.0  # an answer of another process may take as long as a client trains


class Party(ABC):
    """A party of runs on many machines, in a folder of its own.

    Args:
        method: the protocol that it runs, with its owner's hyper-parameters.
        folder: of the party, which is made if it is not there.
        number: on the roster.
        identity: signs what it sends; None in runs without a roster.
        roster: public keys of all parties, from who enrols them, and not from the server.
        policy: what its owner allows; None allows every run of the method that has a roster.
        durable: what it writes outlives a power cut.
    """

    recipient: str  # its name in frames

    def __init__(
        self,
        method: Method,
        folder: Path | str,
        number: int,
        identity: Identity | None,
        roster: Roster | None,
        policy: Policy | None,
        durable: bool = True,
    ) -> None:
        self.method = method
        self.policy = policy or Policy()
        self.folder = Path(folder)
        self.number = number
        self._identity = identity
        self._roster = roster
        self._durable = durable
        self._thread = threading.RLock()
        atomic_files.make_private_folder(self.folder)

    def agree(self, data: bytes) -> str:
        """Take part in a run that a server proposes.

        Args:
            data: a packed `Proposal`, of a server that may propose anything.

        Returns:
            The fingerprint of the configuration, which frames of the run carry.

        Raises:
            FrameError: no proposal.
            PolicyError: a run that this party does not take part in.
        """
        return self._agree(Proposal.unpacked(data))

    @abstractmethod
    def _agree(self, proposal: Proposal) -> str:
        """Take part in a run, and return its fingerprint, or raise PolicyError."""

    @abstractmethod
    def _answered(self, frame: bytes) -> bytes:
        """Return the reply to a frame, or raise one of many errors."""

    def _told(self) -> Any:
        """Return what the party tells of its data, as JSON has it; None for a party without any."""
        return None

    def hello(self, challenge: bytes) -> bytes:
        """Return which party this is, what it tells of its data, and a signature of the challenge.

        Args:
            challenge: JSON of a server: the run, its number for the node, and a number drawn for
                this answer.

        Raises:
            FrameError: no challenge.
        """
        try:
            statement = hello_statement(json.loads(challenge))
        except (ValueError, KeyError, TypeError):
            raise FrameError("a server's challenge has no run, node and nonce") from None
        signature = b"" if self._identity is None else self._identity.sign(statement)
        told = {"number": self.number, "facts": self._told(), "signature": signature.hex()}
        return json.dumps(told).encode()

    def answer(self, frame: bytes) -> bytes:
        """Answer a frame of a run that the party agreed to.

        State and ledger are on the disk before this returns. Where it fails, the party stays as it
        was, but for what the ledger says.

        Args:
            frame: bytes of the request.

        Returns:
            The bytes of the reply, or of a refusal by a code: no text of an error leaves.
        """
        return answered(self._answered, frame, self.recipient, refusals.log)

    def runs(self) -> list[str]:
        """Return the names of the folders of runs that the party has agreed to."""
        return sorted(path.parent.name for path in self.folder.glob(f"run-*/{AGREED}"))

    def _keep(self, config: Mapping[str, Any]) -> str:
        """Write down that the party agreed to a run, and return its fingerprint."""
        run = config_hash(config)
        content = {**config, DRAWS: NAMES}
        with self._alone():
            folder = self._folder_of(run)
            atomic_files.make_private_folder(folder)
            if not (folder / AGREED).exists():
                text = json.dumps(content, sort_keys=True)
                atomic_files.write_atomic(
                    folder / AGREED, text.encode(), atomic_files.OWNER, durable=self._durable
                )
        return run

    def _agreed(self, run: str) -> Mapping[str, Any]:
        """Return the configuration of a run.

        Raises:
            FrameError: a run that the party has not agreed to.
            RunFolderError: its file was changed.
        """
        content = self._content(run)
        config = {name: value for name, value in content.items() if name != DRAWS}
        if config_hash(config) != run:
            path = self._folder_of(run) / AGREED
            raise RunFolderError(f"{path} is not what the node agreed to: restore it from a copy")
        return config

    def _draws_by_name(self, run: str) -> bool:
        """Return whether the party draws by a name; it does by its number in earlier versions.

        Args:
            run: that it agreed to.
        """
        return self._content(run).get(DRAWS) == NAMES

    def _content(self, run: str) -> dict[str, Any]:
        """Return what the file of a run says, which is empty where it cannot be read.

        Raises:
            FrameError: a run that the party has not agreed to.
        """
        path = self._folder_of(run) / AGREED
        if not path.is_file():
            raise FrameError("the node has agreed to no run of this configuration")
        try:
            content = json.loads(atomic_files.read(path))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _write_state(self, run: str, data: bytes) -> tuple[int, int] | None:
        """Write the state of a run, so that it is on the disk when this returns.

        Returns:
            What tells this version of the file from others.
        """
        path = self._folder_of(run) / STATE
        atomic_files.write_atomic(path, data, atomic_files.OWNER, durable=self._durable)
        return stamp_of(path)

    def _folder_of(self, run: str) -> Path:
        if not run.isalnum():
            raise FrameError("the node has agreed to no run of this configuration")
        return self.folder / f"run-{run}"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes from this party's folder.

        Raises:
            RunFolderError: another one has it for too long.
        """
        try:
            with self._thread, FileLock(self.folder / LOCK, timeout=SECONDS_FOR_LOCK, mode=0o600):
                yield
        except Timeout:
            raise RunFolderError(
                f"another process has {self.folder} for more than {SECONDS_FOR_LOCK:.0f} s: stop it"
            ) from None


def hello_statement(challenge: Mapping[str, Any]) -> bytes:
    """Return what a node signs to prove which client it is.

    Args:
        challenge: the run, the server's number for the node, and a number drawn for this answer.
    """
    named = {name: challenge[name] for name in ("run", "node", "nonce")}
    return b"securecluster hello v1 " + json.dumps(named, sort_keys=True).encode()


def number_of(number: int | None, identity: Identity | None, roster: Roster | None) -> int:
    """Return the number of a party, which the roster has for its key.

    Args:
        number: None is that of the roster.
        identity: of the party.
        roster: public keys of all parties; None for none.

    Raises:
        UsageError: no number, or another one than the roster has.
    """
    if roster is None:
        if number is None:
            raise UsageError("a node without a roster has no number: give number")
        return number
    if identity is None:
        raise UsageError("a node on a roster signs what it sends: give identity")
    found = roster.number(identity.public)
    if found is None:
        raise UsageError("the roster has no key of this identity: ask who enrols the clients")
    if number not in (None, found):
        raise UsageError(f"the roster has this identity as client {found}, and not {number}")
    return found


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return what tells one version of a file from another; None without a file.

    Args:
        path: of the file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return (status.st_ino, status.st_mtime_ns)
