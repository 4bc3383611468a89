"""Encryption as a protection of pairs: what it needs and says, and its halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from securecluster.errors import FrameError
from securecluster.protections.encryption import ciphers
from securecluster.protections.encryption.authority import KeyAuthority
from securecluster.protections.encryption.messages import (
    ENCRYPTION_METHODS,
    EncryptedPairReplies,
    encrypted_bits,
    is_encrypted,
)
from securecluster.protections.encryption.pair_release import PairRelease
from securecluster.protections.encryption.pairs import EncryptedPairs, EncryptedPairService
from securecluster.protections.encryption.parameters import Parameters
from securecluster.protections.pair_rows import PairRange
from securecluster.protections.protection import (
    ENCRYPTION,
    HIDDEN_PAIRS,
    LABELS,
    MATRIX,
    AuthorityFacts,
    PairFacts,
    PairProtection,
    ServerKeys,
)

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing

RELEASED_OF_PAIRS = {
    LABELS: "the clusters' labels alone",
    MATRIX: "R_ij of each pair, of numbers rounded to 2^-14, and no part of one client",
}
NO_COLLUSION = (
    "server and key authority must not work together: the server has every client's ciphertexts, "
    "and the authority the one key that opens them, so pads rest on less"
)
BOUND_BY_CLIENTS = (
    "the authority decrypts only sums of what the clients in them signed for it; a server that "
    "breaks the protocol still chooses who is in a sum and may refuse service, and with one client "
    "on its side, or without a roster, where it can pose as clients, it can have a single reply "
    "decrypted"
)


class EncryptedPairProtection(PairProtection):
    """Rows of pairs in ciphertexts, of whose sums a key authority tells R, or labels alone."""

    name = EncryptedPairs.name
    by_authority = True
    methods = ENCRYPTION_METHODS
    claims = frozenset({HIDDEN_PAIRS, ENCRYPTION})

    def check(self) -> None:
        """Check that the package for encryption is installed."""
        ciphers.tenseal()

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
            parameters=Parameters(),
        )

    def server_half(self, facts: PairFacts, keys: ServerKeys) -> EncryptedPairs:
        """Return the server's aggregator.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        return EncryptedPairs(
            run=facts.run,
            parameters=Parameters(),
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

    def authority(self, facts: AuthorityFacts) -> KeyAuthority:
        """Return the key authority of a run.

        Args:
            facts: of the run.
        """
        pair_facts = facts.pairs

        def bits(purpose: str) -> Mapping[str, int]:
            reply = facts.reply_class(purpose)
            if not is_encrypted(reply):
                raise FrameError(f"replies of {purpose[:40]} are not encrypted: the sum is refused")
            return encrypted_bits(reply)

        return KeyAuthority(
            run=facts.run,
            parameters=Parameters(),
            bits=bits,
            minimum=facts.minimum,
            clients=facts.clients,
            randomness=facts.randomness,
            identity=facts.identity,
            roster=facts.roster,
            pairs=PairRelease(pair_facts.ranges, pair_facts.functions, tuple(pair_facts.labelled)),
        )

    def authority_view(self, fields: str) -> list[str]:
        """Return what the key authority saw, and what its part rests on.

        Args:
            fields: names of the fields of whose pairs it decrypted sums.
        """
        saw = ["the only secret key, who is in each sum, and no ciphertext of a single client"]
        if fields:
            saw.append(f"sums of pairs of clients of {fields}, in full")
        return [*saw, NO_COLLUSION, BOUND_BY_CLIENTS]
