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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from securecluster.core import atomic_files
from securecluster.errors import (
    ProposalError,
    RevokedRunError,
    RunFolderError,
    UnknownRunError,
    UsageError,
)
from securecluster.messaging import refusals, run_number
from securecluster.nodes import hello, idle_runs, run_progress
from securecluster.nodes.agreed_runs import AgreedRuns
from securecluster.nodes.policy import Policy
from securecluster.nodes.policy_file import PolicyFile
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.revoked_runs import RevokedRuns, named
from securecluster.nodes.run_progress import Progress
from securecluster.parties.method import Method
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.refusals import answered

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Identity, Roster

RUN = "run-"  # and its fingerprint: the folder of a run
AGREED = "agreed.json"
STATE = "state.safetensors"
IN_RUN = (AGREED, run_progress.NAME, STATE)  # files of a run that was begun
LOCK = "lock"
# what may be removed: files of runs, and of what a kill left half-written also the party's own
FILES = r"agreed\.json|state\.safetensors|progress\.json"
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
        policy: what its owner allows, or the file that says so; None allows every run of the method
            that has a roster.
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
        policy: Policy | PolicyFile | None,
        durable: bool = True,
    ) -> None:
        self.method = method
        self._policy = policy or Policy()
        self.folder = Path(folder)
        self.number = number
        self._identity = identity
        self._roster = roster
        self._durable = durable
        self._thread = threading.RLock()
        self._agreed_runs = AgreedRuns(self.folder, method, number, identity, roster, durable)
        atomic_files.make_private_folder(self.folder)
        self._revoked = RevokedRuns(self.folder, durable)
        self._remove_half_written()

    @property
    def policy(self) -> Policy:
        """Return what the owner allows now.

        Raises:
            OwnerPolicyError: the policy's file cannot be read, so that nothing is allowed.
        """
        if isinstance(self._policy, PolicyFile):
            return self._policy.current()
        return self._policy

    def revoke(self, run: str) -> str:
        """Take this party out of a run for good, and remove its keys and state in it.

        No frame of the run is answered ever again, and no proposal of it accepted. The ledger of
        what was released keeps every line.

        Args:
            run: the run's fingerprint, or the beginning of it.

        Returns:
            The fingerprint.

        Raises:
            RunFolderError: what is left of the run cannot be removed.
            UsageError: no run, or several, that begin so; or one that was revoked already.
        """
        with self._alone():
            fingerprint = revoke(self.folder, run, self._durable)
            self._forget(fingerprint)
            return fingerprint

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
    def _forget(self, run: str) -> None:
        """Forget what is in memory of a run that was revoked."""

    @abstractmethod
    def _agree(self, proposal: Proposal) -> str:
        """Take part in a run, and return its fingerprint, or raise PolicyError."""

    @abstractmethod
    def _answered(self, frame: bytes) -> bytes:
        """Return the reply to a frame, or raise one of many errors."""

    def _told(self) -> Any:
        """Return what the party tells of its data, as JSON has it; None for a party without any."""
        return None

    def introduce(self, challenge: bytes) -> bytes:
        """Return which party this is, what it tells of its data, a signature, and the time here.

        The signature is for the server and the roster that the challenge names, and for no run.

        Args:
            challenge: JSON of a server, as of `hello.challenge_of`.

        Raises:
            FrameError: no challenge.
            PolicyError: of another server or roster than this party's.
        """
        named = hello.challenge_in(challenge, self._roster, self.policy)
        introduction = {
            "number": self.number,
            "facts": self._told(),
            "signature": self._signature(hello.INTRODUCTION, named),
            "clock": int(time.time()),  # by which the server names deadlines
        }
        return json.dumps(introduction).encode()

    def hello(self, challenge: bytes) -> bytes:
        """Return a signature by which this party is the one that agreed to a run.

        Args:
            challenge: JSON of a server, as of `hello.challenge_of`, with the run's fingerprint.

        Raises:
            FrameError: no challenge.
            PolicyError: of another server or roster than this party's.
            UnknownRunError: of a run that it has not agreed to.
        """
        named = hello.challenge_in(challenge, self._roster, self.policy)
        with self._alone():
            self._check_allowed(str(named["run"]), self.policy)
        answer = {"number": self.number, "signature": self._signature(hello.HELLO, named)}
        return json.dumps(answer).encode()

    def _signature(self, purpose: str, challenge: Mapping[str, Any]) -> str:
        """Return the signature of a statement; "" of a party without a roster."""
        if self._identity is None or self._roster is None:
            return ""
        return self._identity.sign(hello.statement_of(purpose, challenge)).hex()

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
            self._refuse_revoked(run)
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
                idle_runs.forget_surplus(self.folder, OWN, unasked, (run_progress.NAME, AGREED))
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
            RevokedRunError: a run that its owner has taken it out of.
            RunFolderError: its file was changed.
        """
        self._refuse_revoked(run)
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

    def _refuse_revoked(self, run: str) -> None:
        """Raise RevokedRunError for a run that the owner has revoked."""
        if run in self._revoked.read():
            raise RevokedRunError(f"the owner of this node has taken it out of the run {run}")

    def _check_allowed(self, run: str, policy: Policy) -> Mapping[str, Any]:
        """Return the configuration of a run that the owner allows, also since it was agreed to.

        Raises:
            OwnerPolicyError: the owner allows it no more.
            UnknownRunError: as of `_agreed`.
        """
        config = self._agreed(run)
        progress = run_progress.read(self._folder_of(run))
        allowed = run_progress.digest_of(policy)
        if progress.allowed != allowed:  # a run without data takes a while
            self._check(config, policy)
            self._write_progress(run, replace(progress, allowed=allowed))
        return config

    def _check(self, config: Mapping[str, Any], policy: Policy) -> None:
        """Raise OwnerPolicyError for a run that the owner does not allow."""
        policy.check(config)

    def _write_progress(self, run: str, progress: Progress) -> None:
        """Write how far this party came in a run."""
        run_progress.write(self._folder_of(run), progress, self._durable)

    def _write_state(self, run: str, data: bytes) -> tuple[int, int] | None:
        """Write the state of a run, so that it is on the disk when this returns.

        Returns:
            What tells this version of the file from others.
        """
        path = self._folder_of(run) / STATE
        begins = not path.exists()
        atomic_files.write_atomic(path, data, atomic_files.OWNER, durable=self._durable)
        begun_runs = [name for name in self.runs() if self._begun(name)] if begins else []
        if len(begun_runs) > idle_runs.MOST_IDLE:  # else nobody reads the ledger for it
            released = self._released_in()
            idle = [name for name in begun_runs if name.removeprefix(RUN) not in released]
            idle_runs.forget_surplus(self.folder, OWN, idle, IN_RUN)
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
            for run in self._revoked.read():  # of which a kill may have left something
                with suppress(OSError):
                    self._revoked.erase(f"{RUN}{run}", OWN)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes from this party's folder.

        Raises:
            RunFolderError: another one has it for too long.
        """
        with self._thread, locked(self.folder):
            yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from a party's folder.

    Args:
        folder: of the party.

    Raises:
        RunFolderError: another one has it for too long.
    """
    try:
        with FileLock(folder / LOCK, timeout=SECONDS_FOR_LOCK, mode=0o600):
            yield
    except Timeout:
        raise RunFolderError(
            f"another process has {folder} for more than {SECONDS_FOR_LOCK:.0f} s: stop it"
        ) from None


def revoke(folder: Path, run: str, durable: bool = True) -> str:
    """Revoke a run in the folder of a party, whose lock the caller has.

    Args:
        folder: of the party.
        run: the run's fingerprint, or the beginning of it.
        durable: what is written outlives a power cut.

    Returns:
        The fingerprint.

    Raises:
        RunFolderError: what is left of the run cannot be removed.
        UsageError: no run, or several, that begin so; or one that was revoked already.
    """
    revoked = RevokedRuns(folder, durable)
    before = revoked.read()
    agreed = [path.parent.name.removeprefix(RUN) for path in folder.glob(f"{RUN}*/{AGREED}")]
    fingerprint = named(run, agreed, before)
    if fingerprint not in before:
        revoked.add(fingerprint)
    with atomic_files.as_run_folder_error(folder / f"{RUN}{fingerprint}", "remove"):
        revoked.erase(f"{RUN}{fingerprint}", OWN)
    if fingerprint in before:
        raise UsageError(f"the run {fingerprint} was revoked at {before[fingerprint]}: it stays so")
    return fingerprint


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
    roster_number = roster.number(identity.public)
    if roster_number is None:
        raise UsageError("the roster has no key of this identity: ask who enrols the clients")
    if number not in (None, roster_number):
        raise UsageError(
            f"the roster has this identity as client {roster_number}, and not {number}"
        )
    return roster_number


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
