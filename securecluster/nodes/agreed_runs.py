"""What a party keeps of all runs that it agreed to: its nonces, and the cohorts of its rosters.

Its folder has a secret, from which its nonces follow, so that it answers the same when it is asked
again, and a line for each run, which is on the disk before a nonce leaves:

- It opens its nonce for one list of commitments of a proposal. A second one would let a server
  choose among seeds that it knows.
- The commitments for the cohorts of a roster are those of its first run, and so is the number of
  cohorts. Sums over two divisions of the same clients could be solved for single ones.
- `most_runs` of the owner's policy bounds the number of lines.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files, manifest
from securecluster.errors import OwnerPolicyError, ProposalError, RunFolderError
from securecluster.nodes.proposal import Proposal
from securecluster.parties import public_randomness
from securecluster.parties.deployment import Deployment
from securecluster.parties.method import Method
from securecluster.parties.public_randomness import Draw, Signed
from securecluster.privacy.masking.pads import transcript as encoded

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Identity, Roster

SECRET, LOG = "nonces.key", "agreements.jsonl"


@dataclass(frozen=True)
class Agreement:
    """One run that a party agreed to.

    Args:
        run: digest of what the server proposed.
        commitments: digest of the list of all commitments; empty without a roster.
        roster: its digest; empty without one.
        clients: of the run.
        cohort_commitments: digest of the part of the list that is of the roster.
        cohorts: number of cohorts into which the run divides its clients; None where it has none.
    """

    run: str
    commitments: str
    roster: str
    clients: int
    cohort_commitments: str
    cohorts: int | None

    @classmethod
    def read(cls, line: str) -> Agreement:
        """Return the agreement of a line of the log."""
        return cls(**json.loads(line))


class AgreedRuns:
    """Record that a party keeps of all runs, in its folder.

    Args:
        folder: of the party, which nobody else changes meanwhile.
        method: the protocol that it runs.
        number: of the party.
        identity: signs nonces; None in runs without a roster.
        roster: public keys of all parties; None for none.
        durable: what is written outlives a power cut.
    """

    def __init__(
        self,
        folder: Path,
        method: Method,
        number: int,
        identity: Identity | None,
        roster: Roster | None,
        durable: bool,
    ) -> None:
        self._log = manifest.Log(folder / LOG, atomic_files.OWNER, durable)
        self._secret_path = folder / SECRET
        self._method = method
        self._number = number
        self._identity = identity
        self._roster = roster
        self._durable = durable

    def drawn(
        self, proposal: Proposal, config: Mapping[str, Any], run_limit: int | None
    ) -> str | None:
        """Return a client's commitments, or the nonces that open them; None where all are open.

        Args:
            proposal: of the server.
            config: that the client derived from it.
            run_limit: runs that the owner allows; None is no bound.

        Raises:
            OwnerPolicyError: a run more than the owner allows.
            ProposalError: commitments that are not all clients', that differ from those that the
                client has seen for this run, or cohorts that differ from those of its roster.
        """
        drawn = public_randomness.is_drawn(config)
        if self._roster is None or drawn or proposal.joins:
            return None
        draw = Draw(config, self._roster)
        nonces = self._nonces(draw)
        commitments = draw.commitments(self._number, *nonces)
        if proposal.commitments is None:
            self._check_new(self._agreement(config, "", ""), run_limit)
            return self._signed(commitments, draw.commitment_statement(self._number, *commitments))
        listed = [Signed.read(text) for text in proposal.commitments]
        draw.check_commitments(listed)
        pairs = [(one.run, one.cohorts) for one in listed]
        if pairs[self._number] != commitments:
            raise ProposalError("the server gives other commitments in this client's name")
        digest = public_randomness.digest_of(pairs)
        of_cohorts = public_randomness.cohorts_digest_of(pairs)
        self._keep(self._agreement(config, digest, of_cohorts), run_limit)
        return self._signed(nonces, draw.nonce_statement(self._number, digest))

    def keep(self, config: Mapping[str, Any], run_limit: int | None) -> None:
        """Write down that the party agrees to a run, whose nonces are open where it has a roster.

        Args:
            config: of the run.
            run_limit: runs that the owner allows; None is no bound.

        Raises:
            OwnerPolicyError: a run more than the owner allows.
            ProposalError: nonces that are missing, or that do not open what the client has seen for
                this run, or cohorts that differ from those of its roster.
        """
        listed, of_cohorts = "", ""
        if self._roster is not None:
            if not public_randomness.is_drawn(config):
                raise ProposalError(
                    "the server proposes a run without nonces of its clients, as earlier versions "
                    "did: let it run this version"
                )
            draw = Draw(public_randomness.proposed_of(config), self._roster)
            pairs = draw.check_nonces(public_randomness.nonces_in(config))
            listed = public_randomness.digest_of(pairs)
            of_cohorts = public_randomness.cohorts_digest_of(pairs)
        self._keep(self._agreement(config, listed, of_cohorts), run_limit)

    def runs(self) -> list[Agreement]:
        """Return all runs that the party agreed to, in their order.

        Raises:
            RunFolderError: the file is damaged.
        """
        _, runs = self._log.recall(manifest.EMPTY, Agreement.read)
        return runs

    def _agreement(self, config: Mapping[str, Any], listed: str, of_cohorts: str) -> Agreement:
        """Return what is written down of a run."""
        cohorts = Deployment(self._method, config).cohorts()
        clients = int(config["clients"])
        return Agreement(
            public_randomness.proposal_digest_of(public_randomness.proposed_of(config)),
            listed,
            str(config.get("roster", "")),
            clients,
            of_cohorts,
            None if cohorts is None else len(cohorts.of(range(clients))),
        )

    def _keep(self, agreement: Agreement, run_limit: int | None) -> None:
        """Write down a run, unless it is there."""
        if self._check_new(agreement, run_limit):
            self._log.append([json.dumps(asdict(agreement))])

    def _check_new(self, agreement: Agreement, run_limit: int | None) -> bool:
        """Return whether a run is new, or raise PolicyError where it must not be agreed to."""
        runs = self.runs()
        for earlier in runs:
            if earlier.run == agreement.run:
                if agreement.commitments not in ("", earlier.commitments):
                    raise ProposalError(
                        "the server gives a second list of commitments for a run, and this client "
                        "has opened its own for the first one"
                    )
                return False
        if run_limit is not None and len(runs) >= run_limit:
            raise OwnerPolicyError(
                f"this client takes part in {run_limit} runs at most, and has agreed to as many "
                "(most_runs of its policy)"
            )
        self._check_cohorts(agreement, runs)
        return True

    def _check_cohorts(self, agreement: Agreement, runs: list[Agreement]) -> None:
        """Raise ProposalError for another division of the clients of a roster into cohorts."""
        before = [earlier for earlier in runs if earlier.roster == agreement.roster != ""]
        for earlier in before:
            same_clients = earlier.clients == agreement.clients
            others = earlier.cohort_commitments != agreement.cohort_commitments
            if same_clients and agreement.cohort_commitments and others:
                raise ProposalError(
                    "the clients of this roster committed themselves to other cohorts in its first "
                    "run: a node that lost its folder since needs it back from a copy, or a new "
                    "key on a new roster"
                )
            if earlier.cohorts is None or agreement.cohorts is None:
                continue
            if not same_clients:
                raise ProposalError(
                    f"runs on this roster have cohorts of {earlier.clients} clients, and this one "
                    f"of {agreement.clients}: sums of both could be solved for single clients, so "
                    "give other clients a roster of their own"
                )
            if earlier.cohorts != agreement.cohorts:
                size = earlier.clients // earlier.cohorts
                raise ProposalError(
                    f"runs on this roster divide its clients into {earlier.cohorts} cohorts, and "
                    f"this one into {agreement.cohorts}: sums of both could be solved for single "
                    f"clients, so give cohort_size={size}, or a new roster"
                )

    def _nonces(self, draw: Draw) -> tuple[bytes, bytes]:
        """Return the nonces for a run and for its roster, which nobody can guess."""
        key = self._secret()
        of_run = encoded("securecluster run nonce v1", self._number, draw.digest)
        of_cohorts = encoded("securecluster roster nonce v1", self._number, draw.of_roster)
        return hmac.digest(key, of_run, "sha256"), hmac.digest(key, of_cohorts, "sha256")

    def _secret(self) -> bytes:
        """Return the secret from which nonces follow, on the disk before it is used."""
        path = self._secret_path
        if not path.exists():
            drawn = secrets.token_bytes(public_randomness.NONCE)
            atomic_files.write_atomic(path, drawn, atomic_files.OWNER, durable=self._durable)
        key = atomic_files.read(path)
        if len(key) != public_randomness.NONCE:
            raise RunFolderError(f"{path} has no secret of 32 bytes: restore it from a copy")
        return key

    def _signed(self, values: tuple[bytes, bytes], statement: bytes) -> str:
        """Return values with the client's signature, as text."""
        assert self._identity is not None  # as every node on a roster has one
        return Signed(*values, self._identity.sign(statement)).as_text()
