"""The key authority of runs on many machines: its keys, and what it decrypted, in its own folder.

It has no data. It takes part in runs of its own protocol object alone, as clients do, so a server
can neither name another function of R nor smaller sums than the protocol has.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import pack, unpack
from securecluster.errors import SecureClusterError, UsageError
from securecluster.messaging import refusals, wire
from securecluster.messaging.messages import Header
from securecluster.nodes.party import STATE, Party, number_of, stamp_of
from securecluster.nodes.policy import Policy
from securecluster.nodes.policy_file import PolicyFile
from securecluster.nodes.proposal import Proposal, accepted_by_authority
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import server_copy
from securecluster.parties.method import Method
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER
from securecluster.protections.registry import RELEVANCES
from securecluster.runtime.authority import Authority

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Identity, Roster

LOG = "log.jsonl"
ANSWERED = "answered"
KEY_METHOD = "authority_key"  # asks for its public key


class AuthorityNode(Party):
    """The key authority of runs on many machines.

    Its folder can be read by its owner alone. It has a folder for each run that the authority
    agreed to (`agreed.json`, `state.safetensors`), and a line for each request in `log.jsonl`: the
    clients of the sum, and whether it was answered.

    Args:
        method: the protocol that the authority runs, with its owner's hyper-parameters.
        folder: of the authority, which is made if it is not there.
        identity: signs its keys; None in runs without a roster.
        roster: public keys of all clients and of the authority, from who enrols them, and not from
            the server.
        policy: what its owner allows, or the file that says so; None allows every run of the method
            that has a roster.

    Raises:
        UsageError: a method without a key authority, or a roster that has this identity as a
            client.
    """

    recipient = "authority"

    def __init__(
        self,
        method: Method,
        folder: Path | str,
        *,
        identity: Identity | None = None,
        roster: Roster | None = None,
        policy: Policy | PolicyFile | None = None,
    ) -> None:
        if not method.pairs.by_authority:
            pairs = [name for name, ours in RELEVANCES.items() if ours.by_authority]
            raise UsageError(
                f"{method.name} has no key authority with these options: runs have one with "
                f"relevance {' or '.join(pairs)}"
            )
        number = number_of(AUTHORITY_NUMBER if roster is None else None, identity, roster)
        if number != AUTHORITY_NUMBER:
            raise UsageError(
                f"the roster has this identity as client {number}, and not as the key authority: "
                "its line there begins with the word authority"
            )
        super().__init__(method, folder, number, identity, roster, policy)
        # by run: the authority, the stamp of the state's file that it agrees with, and the policy
        self._running: dict[str, tuple[Authority, tuple[int, int] | None, Policy]] = {}

    def __repr__(self) -> str:
        return f"AuthorityNode({self.method.name}, {self.folder})"

    def _agree(self, proposal: Proposal) -> str:
        """Take part in a run, and return its fingerprint, or raise PolicyError."""
        return self._keep(accepted_by_authority(proposal, self.method, self.policy, self._roster))

    def _answered(self, frame: bytes) -> bytes:
        """Return the reply to a frame, or raise one of many errors.

        What a refused request changed is on the disk, too: a sum that was refused after it was
        recorded must not be tried in another one.
        """
        header = wire.peek(frame)
        run = header.config
        with self._alone():
            policy = self.policy
            authority = self._living(run, policy)
            outcome = refusals.FAILED
            try:
                reply = authority.reply_frame(frame)
                outcome = ANSWERED
            except SecureClusterError as error:
                outcome = refusals.code_of(error)
                raise
            finally:
                self._store(run, authority, policy)
                self._log(header, outcome)
        return reply

    def _living(self, run: str, policy: Policy) -> Authority:
        """Return the authority of a run as it is on the disk, from memory where that agrees.

        Raises:
            UnknownRunError: a run that the authority has not agreed to.
        """
        self._refuse_revoked(run)
        stamp = stamp_of(self._folder_of(run) / STATE)
        if run in self._running:
            authority, *cached_key = self._running[run]
            if cached_key == [stamp, policy]:
                return authority
        authority = self._authority(self._check_allowed(run, policy), policy)
        if stamp is not None:
            data = atomic_files.read(self._folder_of(run) / STATE)
            authority.restore(unpack(data, type(authority.state)))
        return authority

    def _authority(self, config: Mapping[str, Any], policy: Policy) -> Authority:
        """Return the authority as it is before the first request."""
        deployment = Deployment(server_copy(self.method), config)
        minimum = math.ceil(policy.least_clients)
        authority = deployment.authority(False, self._identity, roster=self._roster, least=minimum)
        assert authority is not None  # of the method, as was checked
        return authority

    def _store(self, run: str, authority: Authority, policy: Policy) -> None:
        """Write the state of a run; what is in memory counts only when it is on the disk."""
        self._running = {}
        stamp = self._write_state(run, pack(authority.state))
        self._running = {run: (authority, stamp, policy)}

    def _forget(self, run: str) -> None:
        """Forget what is in memory of a run that was revoked."""
        self._running.pop(run, None)

    def _released_in(self) -> set[str]:
        """Return the fingerprints of runs in which the authority has decrypted something."""
        if not (self.folder / LOG).exists():
            return set()
        return {
            run
            for run, method, outcome in counted(self.folder)
            if outcome == ANSWERED and method != KEY_METHOD
        }

    def _log(self, header: Header, outcome: str) -> None:
        """Write down a request, so that it is on the disk when this returns."""
        line = {
            "run": header.config,
            "round": header.round,
            "step": header.step,
            "method": header.method,
            "clients": header.group,
            "outcome": outcome,
        }
        path = self.folder / LOG
        atomic_files.append_line(path, json.dumps(line), atomic_files.OWNER, durable=True)


def counted(folder: Path) -> dict[tuple[str, str, str], int]:
    """Return how often an authority was asked, by run, request and outcome.

    Args:
        folder: of the authority.

    Raises:
        RunFolderError: its log is damaged.
    """

    def request(line: str) -> tuple[str, str, str]:
        content = json.loads(line)
        return str(content["run"]), str(content["method"]), str(content["outcome"])

    path = folder / LOG
    requests = manifest.read_lines(path, atomic_files.read(path), request)
    return dict(sorted(Counter(requests).items()))
