"""Encryption as a protection of sums and of pairs: what it needs and says, and its halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from securecluster.errors import FrameError
from securecluster.protections.encryption import ciphers
from securecluster.protections.encryption.authority import KeyAuthority
from securecluster.protections.encryption.client import EncryptedSumService
from securecluster.protections.encryption.messages import (
    ENCRYPTION_METHODS,
    EncryptedPairReplies,
    EncryptedReplies,
    encrypted_bits,
    is_encrypted,
    is_of_pairs,
)
from securecluster.protections.encryption.pair_release import PairRelease
from securecluster.protections.encryption.pairs import EncryptedPairs, EncryptedPairService
from securecluster.protections.encryption.parameters import (
    BFV,
    CKKS,
    Parameters,
    default_parameters,
)
from securecluster.protections.encryption.server import EncryptedSums
from securecluster.protections.pair_rows import PairRange
from securecluster.protections.protection import (
    ENCRYPTION,
    HIDDEN_PAIRS,
    HIDDEN_SUMS,
    LABELS,
    MATRIX,
    AuthorityFacts,
    PairFacts,
    PairProtection,
    Protection,
    ServerKeys,
    SumFacts,
    SumProtection,
)
from securecluster.protections.sum_ranges import SumRanges

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing

RELEASED_OF_PAIRS = {
    LABELS: "the clusters' labels alone",
    MATRIX: "R_ij of each pair, of numbers rounded to 2^-14, and no part of one client",
}
NO_COLLUSION = (
    "server and key authority must not work together: the server has every client's ciphertexts, "
    "and the authority the one key that opens them, so secagg and pads rest on less"
)
BOUND_BY_CLIENTS = (
    "the authority decrypts only sums of what the clients in them signed for it; a server that "
    "breaks the protocol still chooses who is in a sum and may refuse service, and with one client "
    "on its side, or without a roster, where it can pose as clients, it can have a single reply "
    "decrypted"
)


class _Encryption(Protection):
    """Common base of the encryption of replies to sums and to pairs."""

    by_authority = True
    methods = ENCRYPTION_METHODS

    def check(self) -> None:
        """Check that the package for encryption is installed."""
        ciphers.tenseal()

    def authority(self, facts: AuthorityFacts) -> KeyAuthority:
        """Return the key authority of a run, for sums and pairs alike.

        Args:
            facts: of the run.
        """
        return key_authority(facts)

    def authority_view(self, sums: str, pairs: str) -> list[str]:
        """Return what the key authority saw, and what its part rests on.

        Args:
            sums: names of the fields whose sums it decrypted.
            pairs: names of the fields of whose pairs it decrypted sums.
        """
        return authority_view(sums, pairs)


class EncryptedSumProtection(_Encryption, SumProtection):
    """Sums of ciphertexts, which a key authority decrypts.

    Args:
        scheme: of the encryption, whose name the protection has.
    """

    claims = frozenset({HIDDEN_SUMS, ENCRYPTION})

    def __init__(self, scheme: str) -> None:
        self.name = scheme

    def replies(self) -> EncryptedReplies:
        """Return the messages of encrypted sums."""
        return EncryptedReplies()

    def client_half(self, facts: SumFacts, keys: KeyRing) -> EncryptedSumService:
        """Return the clients' service.

        Args:
            facts: of the run.
            keys: the clients' keys.
        """
        return EncryptedSumService(
            ranges=facts.ranges,
            run=facts.run,
            keys=keys,
            minimum=max(facts.minimum, facts.shares),
            parameters=default_parameters(self.name),
            others=_parameters(facts.opened),
            cohorts=facts.cohorts,
        )

    def server_half(self, facts: SumFacts, keys: ServerKeys) -> EncryptedSums:
        """Return the server's aggregator.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        return EncryptedSums(
            run=facts.run,
            ranges=facts.ranges,
            dtype=facts.dtype,
            minimum=max(facts.minimum, facts.shares),
            parameters=default_parameters(self.name),
            private=keys.private,
            roster=keys.roster,
        )

    def read(self, reply: str, released: str) -> str:
        """Return that the server reads sums of a field.

        Args:
            reply: the field, with what else is to be said of it.
            released: that it is sums.
        """
        return f"sums of {reply}: over two clients or more, which a key authority decrypts"

    def unseen(self, field: str, released: str) -> str:
        """Return what the server sees sums of alone: what these tell of it, a run counts.

        Args:
            field: its name.
            released: that it is sums.
        """
        return f"{field} of a single client"


class EncryptedPairProtection(_Encryption, PairProtection):
    """Rows of pairs in ciphertexts, of whose sums a key authority tells R, or labels alone."""

    name = EncryptedPairs.name
    claims = frozenset({HIDDEN_PAIRS, ENCRYPTION})

    def replies(self, ranges: Mapping[str, PairRange]) -> EncryptedPairReplies:
        """Return the messages of encrypted pairs.

        Args:
            ranges: range of each field of rows.
        """
        return EncryptedPairReplies(ranges)

    def client_half(self, facts: PairFacts, keys: KeyRing) -> EncryptedPairService:
        """Return the clients' service.

        Args:
            facts: of the run.
            keys: the clients' keys.
        """
        return EncryptedPairService(
            ranges=facts.ranges,
            saturate=facts.saturate,
            run=facts.run,
            keys=keys,
            minimum=facts.minimum,
            parameters=default_parameters(CKKS),
            others=_parameters(facts.opened),
        )

    def server_half(self, facts: PairFacts, keys: ServerKeys) -> EncryptedPairs:
        """Return the server's aggregator.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        return EncryptedPairs(
            run=facts.run,
            parameters=default_parameters(CKKS),
            private=keys.private,
            roster=keys.roster,
            ranges=facts.ranges,
            functions=facts.functions,
            labelled=facts.labelled,
        )

    def read(self, reply: str, released: str) -> str:
        """Return what the key authority told the server of R of a field.

        Args:
            reply: the field, with what else is to be said of it.
            released: `MATRIX` or `LABELS`.
        """
        description = RELEASED_OF_PAIRS[released]
        return (
            f"R of pairs of clients, from {reply}, of which a key authority released {description}"
        )

    def unseen(self, field: str, released: str) -> str:
        """Return what the server was not told of a field.

        Args:
            field: its name.
            released: `MATRIX` or `LABELS`.
        """
        if released == LABELS:
            return f"{field}, of which it was told the clusters' labels alone"
        return f"{field} of a single client, of which it read sums of pairs"


def key_authority(facts: AuthorityFacts) -> KeyAuthority:
    """Return the key authority of a run.

    Args:
        facts: of the run.
    """
    ranges = SumRanges({})
    if facts.sums is not None:
        ranges = facts.sums.ranges
    pairs = None
    if facts.pairs is not None:
        pair_facts = facts.pairs
        pairs = PairRelease(pair_facts.ranges, pair_facts.functions, tuple(pair_facts.labelled))

    def bits(purpose: str, of_pairs: bool) -> Mapping[str, int]:
        reply = facts.reply_class(purpose)
        if not is_encrypted(reply):
            raise FrameError(f"replies of {purpose[:40]} are not encrypted: the sum is refused")
        # Otherwise a sum would tell all of R where labels alone are released.
        if is_of_pairs(reply) != of_pairs:
            raise FrameError(f"replies of {purpose[:40]} leave in another way: the sum is refused")
        return encrypted_bits(reply)

    return KeyAuthority(
        run=facts.run,
        parameters=_parameters(facts.opened),
        ranges=ranges,
        bits=bits,
        minimum=facts.minimum,
        clients=facts.clients,
        randomness=facts.randomness,
        identity=facts.identity,
        pairs=pairs,
        roster=facts.roster,
        cohorts=facts.cohorts,
    )


def authority_view(sums: str, pairs: str) -> list[str]:
    """Return what the key authority saw, and what its part rests on, for reports.

    Args:
        sums: names of the fields whose sums it decrypted.
        pairs: names of the fields of whose pairs it decrypted sums.
    """
    saw = ["the only secret key, who is in each sum, and no ciphertext of a single client"]
    if sums:
        saw.append(f"sums of {sums}, over two clients or more, in full")
    if pairs:
        saw.append(f"sums of pairs of clients of {pairs}, in full")
    return [*saw, NO_COLLUSION, BOUND_BY_CLIENTS]


def _parameters(names: Sequence[str]) -> list[Parameters]:
    """Return the parameters of the encryptions of a run."""
    return [default_parameters(scheme) for scheme in names]


def bfv_sums() -> EncryptedSumProtection:
    """Return the protection of sums by BFV."""
    return EncryptedSumProtection(BFV)


def ckks_sums() -> EncryptedSumProtection:
    """Return the protection of sums by CKKS."""
    return EncryptedSumProtection(CKKS)
