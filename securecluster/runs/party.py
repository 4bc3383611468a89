"""A party of runs on many machines that is no server: a client's node, or the key authority.

Its folder, which only its owner can read, has a folder for each run that it agreed to. It answers
bytes with bytes, one message at a time, and what it answers is on its disk before the reply leaves.
"""

from __future__ import annotations

import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from securecluster.core import atomic_files
from securecluster.errors import (
    FrameError,
    ProposalError,
    RunFolderError,
    UnknownRunError,
    UsageError,
)
from securecluster.messaging import refusals
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.runs import idle_runs
from securecluster.runs.agreed_runs import AgreedRuns
from securecluster.runs.method import Method
from securecluster.runs.policy import Policy
from securecluster.runs.proposal import Proposal
from securecluster.runtime import run_number
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.refusals import answered

RUN = "run-"  # and its fingerprint: the folder of a run
AGREED = "agreed.json"
STATE = "state.safetensors"
LOCK = "lock"
# what may be removed: files of runs, and of what a kill left half-written also the party's own
FILES = r"agreed\.json|state\.safetensors"
OWN = atomic_files.Own(
    (LOCK,), re.compile(rf"{RUN}[0-9a-z]+(/({FILES}))?|{FILES}|[\w-]+\.jsonl|\w+\.key|policy\.toml")
)
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
        self._agreed_runs = AgreedRuns(self.folder, method, number, identity, roster, durable)
        atomic_files.make_private_folder(self.folder)
        self._remove_half_written()

    def agree(self, data: bytes) -> str:
        """Take part in a run that a server proposes.

        Args:
            data: a packed `Proposal`, of a server that may propose anything.

        Returns:
            The fingerprint of the configuration, which frames of the run carry. Before, where there
            is a roster, a client's commitments and then its nonces (`public_randomness`).

        Raises:
            FrameError: no proposal.
            OwnerPolicyError: a run that its owner forbids.
            ProposalError: another run than that of its own protocol and data.
        """
        proposal = Proposal.unpacked(data)
        try:
            return self._agree(proposal)
        except UsageError as error:  # a protocol that does not work with the proposed facts
            raise ProposalError(str(error)) from None

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
        """Return which party this is, what it tells of its data, a signature, and the time here.

        Args:
            challenge: JSON of a server: the run, its number for the node, and a number drawn for
                this answer.

        Raises:
            FrameError: no challenge.
        """
        try:
            statement = hello_statement(json.loads(challenge))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FrameError("a server's challenge has no run, node and nonce") from None
        signature = b"" if self._identity is None else self._identity.sign(statement)
        told = {
            "number": self.number,
            "facts": self._told(),
            "signature": signature.hex(),
            "clock": int(time.time()),  # by which the server names deadlines
        }
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
        return sorted(path.parent.name for path in self.folder.glob(f"{RUN}*/{AGREED}"))

    def agreed(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield name and configuration of each run that the party has agreed to."""
        for name in self.runs():
            run = name.removeprefix(RUN)
            with suppress(RunFolderError):  # of a run that it can no longer answer
                yield run, self._agreed(run)

    def _drawn(self, proposal: Proposal, config: Mapping[str, Any]) -> str | None:
        """Return what a client adds to the public randomness of a run; None where all is drawn."""
        with self._alone():
            if (self._folder_of(config_hash(config)) / AGREED).exists():
                return None
            return self._agreed_runs.drawn(proposal, config, self.policy.most_runs)

    def _keep(self, config: Mapping[str, Any], joins: bool = False) -> str:
        """Write down that the party agreed to a run, and return its fingerprint.

        Args:
            config: of the run.
            joins: whether the run has ended, and this party is a newcomer.

        Raises:
            OwnerPolicyError: a run more than the owner allows.
            ProposalError: a new run without a number, which could be taken for an earlier one, or
                one of other nonces or cohorts than the party has seen.
        """
        run = config_hash(config)
        with self._alone():
            folder = self._folder_of(run)
            if not (folder / AGREED).exists():
                if run_number.of(config) is None and not joins:
                    raise ProposalError(
                        "the server proposes a run without a number of its own, as earlier "
                        "versions did: let it run this version"
                    )
                self._agreed_runs.keep(config, self.policy.most_runs)
                atomic_files.make_private_folder(folder)
                text = json.dumps(config, sort_keys=True)
                atomic_files.write_atomic(
                    folder / AGREED, text.encode(), atomic_files.OWNER, durable=self._durable
                )
                unasked = [name for name in self.runs() if not self._begun(name)]
                idle_runs.forget_surplus(self.folder, OWN, unasked, (AGREED,))
        return run

    def _begun(self, name: str) -> bool:
        """Return whether the party was asked something in the run of a folder."""
        return (self.folder / name / STATE).exists()

    def _released_in(self) -> set[str]:
        """Return the fingerprints of runs in which the party has released something."""
        return set()

    def _agreed(self, run: str) -> Mapping[str, Any]:
        """Return the configuration of a run.

        Raises:
            UnknownRunError: a run that the party has not agreed to.
            RunFolderError: its file was changed.
        """
        path = self._folder_of(run) / AGREED
        if not path.is_file():
            raise UnknownRunError("the node has agreed to no run of this configuration")
        try:
            config: Mapping[str, Any] = json.loads(atomic_files.read(path))
        except (ValueError, RecursionError):
            config = {}
        if config_hash(config) != run:
            raise RunFolderError(f"{path} is not what the node agreed to: restore it from a copy")
        return config

    def _write_state(self, run: str, data: bytes) -> tuple[int, int] | None:
        """Write the state of a run, so that it is on the disk when this returns.

        Returns:
            What tells this version of the file from others.
        """
        path = self._folder_of(run) / STATE
        begins = not path.exists()
        atomic_files.write_atomic(path, data, atomic_files.OWNER, durable=self._durable)
        asked = [name for name in self.runs() if self._begun(name)] if begins else []
        if len(asked) > idle_runs.MOST_IDLE:  # else nobody reads the ledger for it
            released = self._released_in()
            idle = [name for name in asked if name.removeprefix(RUN) not in released]
            idle_runs.forget_surplus(self.folder, OWN, idle, (AGREED, STATE))
        return stamp_of(path)

    def _folder_of(self, run: str) -> Path:
        if not run.isalnum():
            raise UnknownRunError("the node has agreed to no run of this configuration")
        return self.folder / f"{RUN}{run}"

    def _remove_half_written(self) -> None:
        """Remove what processes that were killed left, unless another one has the folder now."""
        with suppress(Timeout), FileLock(self.folder / LOCK, timeout=0, mode=0o600):
            for folder in (self.folder, *self.folder.glob(f"{RUN}*")):
                atomic_files.remove_half_written(folder, OWN)

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
