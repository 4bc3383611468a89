"""The server's part in the agreement on a run, whatever carries its messages.

Without a roster it takes one exchange with each party, and with one three: commitments of the
clients, the nonces that open them, and the configuration that follows (`public_randomness`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from securecluster.errors import FrameError, ProposalError, RefusedError
from securecluster.messaging import refusals
from securecluster.nodes.party import Party
from securecluster.nodes.proposal import Proposal
from securecluster.parties.public_randomness import Draw, Signed, digest_of, is_drawn
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER
from securecluster.runtime.endpoint import config_hash

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

# from what parties are sent, by number, to what all of them answer; it raises for one that does not
Ask = Callable[[Mapping[int, bytes]], Mapping[int, str]]


def agreed_among(proposal: Proposal, roster: Roster | None, parties: Iterable[Party]) -> Proposal:
    """Return a proposal as parties in this process have agreed to it.

    Args:
        proposal: of the server.
        roster: public keys of the parties; None in runs without one.
        parties: the clients' nodes, and that of the key authority where there is one.

    Raises:
        PolicyError: a party that refuses the run.
    """
    doors = {party.number: party.agree for party in parties}
    return agreed(
        proposal,
        roster,
        sorted(doors),
        lambda sent: {number: doors[number](data) for number, data in sent.items()},
    )


def agreed(proposal: Proposal, roster: Roster | None, parties: list[int], ask: Ask) -> Proposal:
    """Return a proposal as all parties have agreed to it, with the clients' nonces.

    Args:
        proposal: of the server, of a new run or of one that goes on.
        roster: public keys of the parties; None in runs without one.
        parties: numbers of the clients, and that of the key authority where there is one.
        ask: carries messages to parties.

    Raises:
        RefusedError: a party that refuses the run, does not commit itself, or does not open its
            commitment, so that the run does not begin.
    """
    if roster is not None and not is_drawn(proposal.config) and not proposal.joins:
        clients = [number for number in parties if number != AUTHORITY_NUMBER]
        proposal = _drawn(proposal, roster, clients, ask)
    run = config_hash(proposal.config)
    for number, answer in sorted(ask(dict.fromkeys(parties, proposal.packed())).items()):
        if answer != run:
            raise _refused(number, "agrees to another run than the server proposes")
    return proposal


def _drawn(proposal: Proposal, roster: Roster, clients: list[int], ask: Ask) -> Proposal:
    """Return a proposal with the nonces of all clients."""
    draw = Draw(proposal.config, roster)
    answers = ask(dict.fromkeys(clients, proposal.packed()))
    if set(answers.values()) == {config_hash(proposal.config)}:
        return proposal  # a run of an earlier version, which goes on
    commitments = []
    for number in clients:
        try:
            commitment = Signed.read(answers.get(number))
            draw.check_commitment(number, commitment)
        except (FrameError, ProposalError):
            raise _refused(number, "does not commit itself to a nonce") from None
        commitments.append(commitment)
    relayed = replace(proposal, commitments=tuple(one.as_text() for one in commitments))
    listed = digest_of([(one.run, one.cohorts) for one in commitments])
    answers = ask(dict.fromkeys(clients, relayed.packed()))
    nonces = []
    for number, commitment in zip(clients, commitments, strict=True):
        try:
            nonce = Signed.read(answers.get(number))
            draw.check_opened(number, nonce, commitment, listed)
        except (FrameError, ProposalError):
            raise _refused(number, "does not open the nonce that it committed itself to") from None
        nonces.append(nonce)
    return replace(proposal, config=draw.configured(nonces))


def _refused(number: int, what: str) -> RefusedError:
    """Return the error for a party without which the run does not begin."""
    party = "the key authority" if number == AUTHORITY_NUMBER else f"client {number}"
    return RefusedError(
        f"{party} {what}: no run begins under this number, so look at its log, and propose another",
        refusals.PROPOSAL,
    )
