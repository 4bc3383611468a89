"""Public randomness of a run on a roster, which nobody picks who knows what the others drew.

Cohorts, participants, code books and first models follow from public seeds. A server that chose
these could try many, until a client shares its cohort with clients of the server's own. So they
follow from the proposal, to which the server is held first, and from nonces of all clients (commit,
then reveal: Blum, "Coin flipping by telephone", CRYPTO 1981):

1. A server proposes a run, and each client answers with signed commitments to two nonces.
2. It relays all commitments. Each client checks them, and opens its own: once for a proposal, and
   with a signature of the whole list.
3. It relays all nonces. Each party checks that all clients signed the one list that these open, and
   derives the seeds. They are part of the configuration, and so of the run's fingerprint.

One nonce is of the run, and gives its seed. The other one is of the roster, the same in all of its
runs, and gives the order by which its clients are divided into cohorts: a client that answers with
another one is refused by all others, so no later run divides them anew.

A party that does not open its commitment keeps the run from beginning. It can choose between that
and one drawn seed, and each attempt counts against `most_runs` of the others' policies.

Without a roster nobody knows who the other clients are, and the server's seed stays.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securecluster.errors import FrameError, ProposalError
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.privacy.masking.pads import transcript as encoded

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

# entries of a configuration: opened nonces of all clients, the seed that the server proposed, and
# that of the order of the clients in cohorts. The seed of the run stands in its usual place.
NONCES, PROPOSED, COHORTS = "nonces", "proposed_seed", "cohort_seed"
NONCE = 32  # bytes of a nonce and of a commitment
_PARTS = (NONCE, NONCE, SIGNATURE)


@dataclass(frozen=True)
class Signed:
    """Two values of a client, for the run and for the cohorts of its roster, and its signature.

    Args:
        run: a commitment, or a nonce, of 32 bytes.
        cohorts: likewise.
        signature: of 64 bytes.
    """

    run: bytes
    cohorts: bytes
    signature: bytes

    def as_text(self) -> str:
        """Return the values and the signature as text for JSON."""
        return base64.b64encode(self.run + self.cohorts + self.signature).decode()

    @classmethod
    def read(cls, text: Any) -> Signed:
        """Return what `as_text` wrote.

        Args:
            text: of a party that may send anything.

        Raises:
            FrameError: it is something else.
        """
        try:
            data = base64.b64decode(text.encode("ascii"), validate=True)
        except (AttributeError, ValueError, binascii.Error):
            data = b""
        if len(data) != sum(_PARTS):
            raise FrameError("a client's nonces, or its commitments, do not parse")
        return cls(data[:NONCE], data[NONCE : 2 * NONCE], data[2 * NONCE :])


class Draw:
    """Drawing of the public randomness of one proposed run.

    Args:
        config: that a server proposes, without nonces.
        roster: public keys of its clients.
    """

    def __init__(self, config: Mapping[str, Any], roster: Roster) -> None:
        self.config = config
        self.clients = int(config["clients"])
        self._roster = roster
        self.digest = proposal_digest_of(config)
        self.of_roster = encoded("", roster.digest, self.clients)

    def commitments(self, number: int, run: bytes, cohorts: bytes) -> tuple[bytes, bytes]:
        """Return a client's commitments, which no other client can open.

        Args:
            number: of the client.
            run: its nonce for this run.
            cohorts: its nonce for all runs of the roster.
        """
        of_run = encoded("securecluster nonce v1", self.digest, number, run)
        of_cohorts = encoded("securecluster cohort nonce v1", self.of_roster, number, cohorts)
        return hashlib.sha256(of_run).digest(), hashlib.sha256(of_cohorts).digest()

    def commitment_statement(self, number: int, run: bytes, cohorts: bytes) -> bytes:
        """Return what a client signs with its commitments.

        Args:
            number: of the client.
            run: its commitment for this run.
            cohorts: its commitment for all runs of the roster.
        """
        label = "securecluster commitments v1"
        return encoded(label, self.digest, self.of_roster, number, run, cohorts)

    def nonce_statement(self, number: int, commitments: str) -> bytes:
        """Return what a client signs with its nonces.

        Args:
            number: of the client.
            commitments: digest of the list of all of them.
        """
        return encoded("securecluster nonces v1", self.digest, self.of_roster, number, commitments)

    def check_commitment(self, number: int, signed: Signed) -> None:
        """Check that a client signed its commitments.

        Args:
            number: of the client.
            signed: its commitments.

        Raises:
            ProposalError: it did not.
        """
        statement = self.commitment_statement(number, signed.run, signed.cohorts)
        self._check(number, statement, signed, "commitments")

    def check_commitments(self, signed: Sequence[Signed]) -> None:
        """Check the commitments of all clients.

        Args:
            signed: by each client, in the order of their numbers.

        Raises:
            ProposalError: they are not of all clients, or one has those of another, or did not sign
                its own.
        """
        self._check_whole([one.run for one in signed], "commitments")
        self._check_whole([one.cohorts for one in signed], "commitments")
        for number, one in enumerate(signed):
            self.check_commitment(number, one)

    def check_nonces(self, signed: Sequence[Signed]) -> list[tuple[bytes, bytes]]:
        """Return the commitments that nonces open, after a check of the nonces of all clients.

        Args:
            signed: by each client, in the order of their numbers.

        Raises:
            ProposalError: they are not of all clients, or one of them did not sign the commitments
                that these nonces open.
        """
        self._check_whole([one.run for one in signed], "nonces")
        self._check_whole([one.cohorts for one in signed], "nonces")
        opened = [self.commitments(i, one.run, one.cohorts) for i, one in enumerate(signed)]
        listed = digest_of(opened)
        for number, one in enumerate(signed):
            self._check(number, self.nonce_statement(number, listed), one, "nonces")
        return opened

    def check_opened(self, number: int, nonce: Signed, commitment: Signed, listed: str) -> None:
        """Check that a client opens its own commitment, and signs the list that it is in.

        Args:
            number: of the client.
            nonce: that it sent.
            commitment: that it sent before.
            listed: digest of the list of all commitments.

        Raises:
            ProposalError: it does not.
        """
        opened = self.commitments(number, nonce.run, nonce.cohorts)
        if opened != (commitment.run, commitment.cohorts):
            raise ProposalError(f"client {number} opens another commitment than its own")
        self._check(number, self.nonce_statement(number, listed), nonce, "nonces")

    def configured(self, nonces: Sequence[Signed]) -> dict[str, Any]:
        """Return the configuration of the run, whose seeds follow from all nonces.

        Args:
            nonces: of each client, in the order of their numbers.

        Raises:
            ProposalError: as `check_nonces` says.
        """
        self.check_nonces(nonces)
        runs = encoded("securecluster run seed v1", self.digest, *(one.run for one in nonces))
        orders = [one.cohorts for one in nonces]
        return {
            **self.config,
            "seed": _seed(runs),
            PROPOSED: self.config["seed"],
            COHORTS: _seed(encoded("securecluster cohort seed v1", self.of_roster, *orders)),
            NONCES: [one.as_text() for one in nonces],
        }

    def _check_whole(self, values: Sequence[bytes], what: str) -> None:
        """Raise ProposalError unless there is a value of each client, and no two are one."""
        if len(values) != self.clients:
            raise ProposalError(
                f"the server gives {what} of {len(values)} clients, and the run has {self.clients}"
            )
        first: dict[bytes, int] = {}
        for number, value in enumerate(values):
            if value in first:
                raise ProposalError(
                    f"client {number} has the {what} of client {first[value]}: it drew none itself"
                )
            first[value] = number

    def _check(self, number: int, statement: bytes, signed: Signed, what: str) -> None:
        """Raise ProposalError unless a client signed a statement."""
        try:
            self._roster.check(number, statement, signed.signature)
        except FrameError:
            raise ProposalError(
                f"client {number} did not sign these {what} for this run and this roster: the "
                "server, or the client, gives others than the rest were given"
            ) from None


def proposal_digest_of(config: Mapping[str, Any]) -> str:
    """Return the digest of what a server proposes; its number of the run is in it.

    Args:
        config: of the run, without nonces.
    """
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def digest_of(commitments: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the digest of a list of commitments, by which a client knows it again.

    Args:
        commitments: for the run and for the roster, of each client.
    """
    flattened = [commitment for pair in commitments for commitment in pair]
    return hashlib.sha256(encoded("securecluster list v1", *flattened)).hexdigest()


def cohorts_digest_of(commitments: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the digest of the part of a list that is the same in all runs of a roster.

    Args:
        commitments: for the run and for the roster, of each client.
    """
    cohort_commitments = [cohorts for _, cohorts in commitments]
    return hashlib.sha256(encoded("securecluster cohort list v1", *cohort_commitments)).hexdigest()


def is_drawn(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has the clients' nonces.

    Args:
        config: of a run on many machines.
    """
    return NONCES in config


def proposed_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server proposed before clients drew nonces.

    Args:
        config: of a run on many machines, with or without nonces.

    Raises:
        FrameError: it has nonces, and no seed that the server proposed.
    """
    proposed = {name: config[name] for name in config if name not in (NONCES, PROPOSED, COHORTS)}
    if is_drawn(config):
        if type(config.get(PROPOSED)) is not int:
            raise FrameError("the server proposed no run")
        proposed["seed"] = config[PROPOSED]
    return proposed


def nonces_in(config: Mapping[str, Any]) -> list[Signed]:
    """Return the nonces in a configuration.

    Args:
        config: of a server that may send anything.

    Raises:
        FrameError: they do not parse.
    """
    listed = config[NONCES]
    if not isinstance(listed, list):
        raise FrameError("a client's nonces, or its commitments, do not parse")
    return [Signed.read(text) for text in listed]


def cohort_seed(config: Mapping[str, Any]) -> int:
    """Return the seed of the order in which clients are divided into cohorts.

    Args:
        config: what clients and server agreed on; of a run without nonces it is the run's own seed.
    """
    return int(config.get(COHORTS, config["seed"]))


def _seed(content: bytes) -> int:
    """Return a seed of 63 bits, which every library takes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
