"""The key authority: a party that holds the only secret key, and decrypts sums for the server.

It is reached by messages, as clients are. It is given sums of ciphertexts, with the list of clients
that they are over, and never a ciphertext of one client, which its key would open. It does not
trust the server's addition: each client seals tags of its ciphertexts to it and signs them, and it
decrypts what has the tags of all listed clients added up (`protections/encryption/tags.py`). So it
decrypts sums of what those clients encrypted in this call, with each ciphertext in one of them, and
sums of one call over disjoint lists of clients.

The guarantee rests on server and authority not working together: the server has every client's
ciphertexts, and the authority the key that opens them. It cannot be replaced by a key that all
clients hold: one client that tells the server that key would open everything. Against a server that
breaks the protocol it rests on the roster, too, and on no client working with the server: a client
may encrypt what it likes, such as the ciphertexts of all others but one with the sign turned.

Security rules: no sum is over fewer than two clients; no ciphertext is in two sums, so that a
server which was restarted asks clients anew and a sum of old and new ciphertexts is refused; a sum
is recorded before it is decrypted, so that refusals count; the same sum again is decrypted again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, PolicyError, UnknownRunError
from securecluster.messaging import wire
from securecluster.messaging.bounds import Limits, check
from securecluster.messaging.messages import AUTHORITY_CALL, Header, Rows, parse_ids, reply_header
from securecluster.messaging.octets import as_bytes, as_table
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import AUTHORITY as PARTY
from securecluster.messaging.refusals import log, reraise
from securecluster.privacy.masking.identities import SIGNATURE, UNSIGNED
from securecluster.privacy.masking.pads import KEY, KeyPair, transcript
from securecluster.protections.encryption.ciphers import SecretCipher
from securecluster.protections.encryption.client import (
    AUTHORITY,
    SERVER,
    from_blocks,
    key_statement,
)
from securecluster.protections.encryption.envelopes import (
    EnvelopeContext,
    open_bytes,
    open_envelope,
    padded,
)
from securecluster.protections.encryption.messages import (
    AUTHORITY_METHODS,
    AuthorityKey,
    AuthorityRequest,
    EncryptedPairTotal,
    ReleasedPairs,
)
from securecluster.protections.encryption.packing import Layout, unpack
from securecluster.protections.encryption.pair_release import PairRelease
from securecluster.protections.encryption.parameters import CKKS, MOST_DECRYPTIONS, Parameters
from securecluster.protections.encryption.tags import LinearTags, from_text
from securecluster.runtime.refusals import answered

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Identity, Roster

PAIRS = "pairs"  # the verb, as the endpoint has it, which imports this module
# calls whose sums the authority remembers; it refuses older ones
KEPT_CALLS = 64
Bits = Callable[[str], Mapping[str, int]]


@dataclass
class DecryptedSum:
    """A sum that the key authority decrypted.

    Attributes:
        survivors: clients whose rows are in it, as text.
        digest: of its ciphertexts and of all boxes.
        boxes: digest of each client's box.
    """

    survivors: str
    digest: bytes
    boxes: list[bytes]


@dataclass
class AuthorityState:
    """State that the key authority keeps between messages; never printed.

    Attributes:
        secret: its keys of the encryption, by scheme.
        exchange: its private key for envelopes.
        sums: the sums that it decrypted, by call and purpose.
        floor: number of the first call whose sums it still decrypts.
        decryptions: number of ciphertexts that it decrypted.
    """

    secret: dict[str, bytes] = field(default_factory=dict, repr=False)
    exchange: bytes = field(default=b"", repr=False)
    sums: dict[str, list[DecryptedSum]] = field(default_factory=dict)
    floor: int = 0
    decryptions: int = 0


class KeyAuthority:
    """Key authority of one run.

    TenSEAL takes its randomness from the operating system alone, so the keys of the encryption do
    not follow from the run's seed, and exact sums are the same all the same.

    Args:
        run: hash of the run's configuration.
        parameters: of the encryption.
        bits: returns the bits of the field of a client method's replies.
        minimum: members of the smallest sum that is decrypted.
        clients: number of clients of the run.
        randomness: source of the key for envelopes in simulations; None takes it from the operating
            system.
        identity: signs the public keys; None where clients have no roster.
        roster: identities of the clients whose boxes count; None verifies no signature, and a
            server that breaks the protocol can then play any client.
        pairs: what it tells of R.
    """

    def __init__(  # noqa: PLR0913 (what one party of a run is made of)
        self,
        run: str,
        parameters: Parameters,
        bits: Bits,
        minimum: int,
        clients: int,
        randomness: Randomness | None = None,
        identity: Identity | None = None,
        roster: Roster | None = None,
        *,
        pairs: PairRelease,
    ) -> None:
        self._run = run
        self._roster = roster
        self._pairs = pairs
        self._parameters = parameters
        self._bits = bits
        self._minimum = minimum
        self._clients = clients
        self._randomness = randomness
        self._identity = identity
        self._secret_cipher: SecretCipher | None = None
        # called with R, for audits of what the authority learns
        self.observe: Callable[[VerbOutcome], None] | None = None
        self.state = AuthorityState()
        # Called with each error that a frame caused: its text stays here. Simulations raise it.
        self.on_refusal: Callable[[Exception], None] = log
        if randomness is not None:
            self.on_refusal = reraise

    def restore(self, state: AuthorityState) -> None:
        """Set the state of a checkpoint, or of an earlier process.

        Args:
            state: the state.
        """
        self.state = state
        # Keys follow from the state alone: those of the replaced state must not answer.
        self._secret_cipher = None

    def answer_frame(self, data: bytes) -> bytes:
        """Answer one encoded frame of the server.

        Security rule: no error leaves the authority but as a code, since what it says of
        decryptions may hold clients' numbers.

        Args:
            data: bytes of the request.

        Returns:
            The bytes of the reply, or of a refusal.
        """
        return answered(self.reply_frame, data, AUTHORITY, self.on_refusal)

    def reply_frame(self, data: bytes) -> bytes:
        """Return the reply to a frame; who calls this sends no text of an error.

        Args:
            data: bytes of the request.

        Raises:
            FrameError: a frame that does not parse, or is not for the authority of this run.
            PolicyError: a sum that it does not decrypt.
        """
        header = wire.peek(data)
        if header.method not in AUTHORITY_METHODS or header.recipient != AUTHORITY:
            raise FrameError(
                f"a frame for {header.recipient[:40]} reached the key authority: check the "
                "addresses"
            )
        # Clients have no business with the authority: they get its key, signed, from the server.
        if header.verb != AUTHORITY_CALL or header.sender != SERVER:
            raise FrameError("the key authority answers the server alone: the frame is refused")
        if header.config != self._run:
            raise UnknownRunError(
                "the server runs another configuration than the key authority: start both from "
                "the same one"
            )
        query: Any
        _, query = wire.decode(data, AUTHORITY_METHODS[header.method][0])
        # Sizes are bounded before anything is decrypted.
        check(query, Limits())
        if header.method == "authority_key":
            reply = self._offer(query)
        else:
            reply = self._tell_of_pairs(header, query)
        return wire.encode(reply_header(header), reply)

    def _offer(self, query: AuthorityRequest) -> Any:
        """Return the public keys, signed."""
        cipher = self._cipher(query.scheme)
        exchange = self._exchange().public
        public = padded(cipher.public)
        signature = UNSIGNED
        if self._identity is not None:
            statement = key_statement(self._run, cipher.fingerprint, exchange)
            signature = self._identity.sign(statement)
        return AuthorityKey(
            public=Rows(as_table([public], len(public))),
            exchange=Rows(as_table([exchange], KEY)),
            signature=Rows(as_table([signature], SIGNATURE)),
        )

    def _tell_of_pairs(self, header: Header, query: EncryptedPairTotal) -> ReleasedPairs:
        """Return what is told of R: labels, or R itself."""
        self._pairs.check(query.then)
        group, survivors = self._members(header, query)
        bits = self._bits(query.purpose)
        layout = self._pairs.layout(query.layout, bits, len(group))
        (name,) = bits
        largest = {name: self._pairs.largest(name)}
        sums = self._opened(header, query, group, survivors, layout, largest)
        if self.observe is not None:
            upper = self._pairs.relevance(name, sums[name], group, survivors)
            relevance = upper + upper.T
            outcome = VerbOutcome(
                PARTY, query.purpose, PAIRS, header.round, header.step, (survivors,), relevance
            )
            self.observe(outcome)
        numbers = self._pairs.numbers(name, sums[name], group, survivors, query.then)
        return ReleasedPairs(Rows(numbers[None]))

    def _members(
        self, header: Header, query: EncryptedPairTotal
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the members of a sum, and those whose rows are in it."""
        group = parse_ids(header.group, self._clients_in(header.group))
        survivors = parse_ids(query.survivors, header.members)
        self._check_members(header, query, group, survivors)
        return group, survivors

    def _opened(
        self,
        header: Header,
        query: EncryptedPairTotal,
        group: Sequence[int],
        survivors: Sequence[int],
        layout: Layout,
        largest: Mapping[str, int],
    ) -> dict[str, NDArray[np.int64]]:
        """Return the sums of integers in an envelope, which must be those of its clients."""
        cipher = self._cipher(query.scheme)
        parameters = cipher.parameters
        to_authority = EnvelopeContext(
            fingerprint=cipher.fingerprint,
            run=self._run,
            purpose=query.purpose,
            call=header.step,
            attempt=header.attempt,
            sender=SERVER,
            receiver=AUTHORITY,
            group=f"{header.group}/{query.survivors}",
            layout=query.layout,
        )
        ciphertexts = open_envelope(
            from_blocks(query.envelope, 0),
            self._exchange(),
            as_bytes(query.server.value),
            to_authority,
            layout.ciphertexts(parameters),
            parameters,
        )
        self._check_sum(query, survivors, cipher, to_authority, header.group, ciphertexts)
        # Recorded before it is decrypted, so that one that is then refused is not tried in another.
        self._record(header, query, survivors, ciphertexts)
        slots = [cipher.flooded(data, len(group)) for data in ciphertexts]
        return unpack(slots, layout, largest, parameters, header.members)

    def _check_sum(
        self,
        query: EncryptedPairTotal,
        survivors: Sequence[int],
        cipher: SecretCipher,
        context: EnvelopeContext,
        group: str,
        ciphertexts: Sequence[bytes],
    ) -> None:
        """Raise an error unless ciphertexts are the sum of those that the clients made tags of.

        Security rule: the server has the public key and every client's ciphertexts, so whatever it
        had decrypted besides sums would be an oracle: for a single reply, or for the secret key.

        Args:
            query: the server's request.
            survivors: clients of the sum.
            cipher: keys of the encryption.
            context: of the sum, whose sender is the server.
            group: clients that were asked, as text.
            ciphertexts: of the sum.
        """
        rows = []
        keys = []
        parties = self._boxes(query, survivors)
        for client, (public, box, signature) in zip(survivors, parties, strict=True):
            sent = replace(context, sender=f"client/{client}", group=group)
            if self._roster is not None:
                self._roster.check(client, sent.signed(box), signature)
            content = open_bytes(box, self._exchange(), public, sent)
            key, tags = from_text(content, len(ciphertexts), cipher.parameters)
            keys.append(key)
            rows.append(tags)
        different = [client for client, key in zip(survivors, keys, strict=True) if key != keys[0]]
        if different:
            raise FrameError(
                f"clients {survivors[0]} and {different[0]} tag their ciphertexts under different "
                "keys, so nothing binds their sum: they were sent different models or numbers to "
                "compute from, or have not agreed on one seed; start a new run"
            )
        tags_of = LinearTags(cipher.parameters, keys[0])
        for number, data in enumerate(ciphertexts):
            expected = tags_of.added([row[number] for row in rows])
            if tags_of.of(cipher.coefficients(data)) != expected:
                raise FrameError(
                    f"the key authority is given ciphertexts that are not the sum of what clients "
                    f"{query.survivors} encrypted in this call: they are not decrypted"
                )

    def _boxes(
        self, query: EncryptedPairTotal, survivors: Sequence[int]
    ) -> list[tuple[bytes, bytes, bytes]]:
        """Return key, box and signature of each client of a sum."""
        tables = (query.keys.value, query.boxes.value, query.signatures.value)
        if any(len(table) != len(survivors) for table in tables):
            raise FrameError("a sum came with the boxes of more or fewer clients than it is over")
        return [
            (as_bytes(key), as_bytes(box), as_bytes(signature))
            for key, box, signature in zip(*tables, strict=True)
        ]

    def _clients_in(self, text: str) -> int:
        """Return how many clients a list can have: as many as it names, within the run's."""
        clients = 0
        for run in text.split(","):
            first, _, last = run.partition("-")
            # The text is bounded before it is read as numbers: it may name 10^18 clients.
            if first.isdecimal() and (last.isdecimal() or not last) and len(run) <= 21:
                clients += int(last or first) - int(first) + 1
        return max(0, min(clients, self._clients))

    def _check_members(
        self,
        header: Header,
        query: EncryptedPairTotal,
        group: Sequence[int],
        survivors: Sequence[int],
    ) -> None:
        """Raise PolicyError for a sum over too few clients, or one that shows another's difference.

        Security rule: of one call, the authority decrypts sums over disjoint lists of clients. Two
        sums that differ by one client would show that client's row.
        """
        # Rows of strangers would be subtracted from a later sum over them alone.
        if not set(survivors) <= set(group):
            raise PolicyError("the key authority is given a sum over clients that are no members")
        if len(survivors) < self._minimum:
            raise PolicyError(
                f"the key authority decrypts sums over {self._minimum} clients or more, and this "
                f"one is over {len(survivors)}"
            )
        # What was released then is forgotten, so it cannot be compared any more.
        if header.step < self.state.floor:
            raise PolicyError(
                f"the key authority refuses the sum of call {header.step}: it has long decrypted "
                "later ones"
            )
        for earlier in self.state.sums.get(_name_of(header, query), []):
            text = earlier.survivors
            other = parse_ids(text, self._clients_in(text))
            if text != query.survivors and not set(other).isdisjoint(survivors):
                raise PolicyError(
                    "the key authority has decrypted another sum over some of these clients in "
                    f"call {header.step}: their difference would show single rows"
                )

    def _record(
        self,
        header: Header,
        query: EncryptedPairTotal,
        survivors: Sequence[int],
        ciphertexts: Sequence[bytes],
    ) -> None:
        """Record a sum, unless one of its ciphertexts was in another one.

        Security rule: no ciphertext is in two sums. The same sum again is decrypted again, so that
        a reply that was lost costs nothing; and a server that was restarted asks its clients again,
        who all encrypt anew. Sums that share only some of their ciphertexts would show differences
        of single rows.
        """
        boxes = [_digest(key, box) for key, box, _ in self._boxes(query, survivors)]
        digest = _digest(*ciphertexts, *boxes)
        sums = self.state.sums.setdefault(_name_of(header, query), [])
        if all(earlier.digest != digest for earlier in sums):
            if any(not set(boxes).isdisjoint(earlier.boxes) for earlier in sums):
                raise PolicyError(
                    "the key authority has decrypted another sum with ciphertexts of some of these "
                    f"clients in call {header.step}: their difference would show single rows"
                )
            sums.append(DecryptedSum(query.survivors, digest, boxes))
        self._count(len(ciphertexts))
        self._forget()

    def _count(self, ciphertexts: int) -> None:
        """Count decrypted ciphertexts, or raise PolicyError where they are too many."""
        if self.state.decryptions + ciphertexts > MOST_DECRYPTIONS:
            raise PolicyError(
                f"the key authority has decrypted {self.state.decryptions} ciphertexts, and its "
                f"flooding noise is for {MOST_DECRYPTIONS}: start a new run, with new keys"
            )
        self.state.decryptions += ciphertexts

    def _forget(self) -> None:
        """Forget sums of calls long ago: the record of a long run stays small."""
        sums = self.state.sums
        calls = sorted({int(name.partition(" ")[0]) for name in sums})
        for call in calls[:-KEPT_CALLS]:
            for name in [name for name in sums if name.startswith(f"{call} ")]:
                del sums[name]
            # The floor keeps old calls closed.
            self.state.floor = call + 1

    def _cipher(self, scheme: str) -> SecretCipher:
        """Return the keys of the encryption, which are made once a run.

        Args:
            scheme: that a frame names.
        """
        if scheme != CKKS:
            raise FrameError(
                f"this run does not encrypt by {scheme[:20]!r}: start all parties from the same "
                "configuration"
            )
        if self._secret_cipher is None:
            secret = self.state.secret.get(CKKS)
            if secret is None:
                self._secret_cipher = SecretCipher.generate(self._parameters)
                self.state.secret[CKKS] = self._secret_cipher.secret
            else:
                self._secret_cipher = SecretCipher(self._parameters, secret)
        return self._secret_cipher

    def _exchange(self) -> KeyPair:
        """Return the keys for envelopes."""
        if not self.state.exchange:
            # Stored with the state: a new process opens envelopes that were sealed for this one.
            self.state.exchange = os.urandom(KEY)
            if self._randomness is not None:
                self.state.exchange = self._randomness.key("authority", "envelopes x25519")
        return KeyPair(self.state.exchange)


def _digest(*chunks: bytes) -> bytes:
    """Return SHA-256 of some bytes, 32 bytes."""
    return hashlib.sha256(transcript("securecluster decrypted sum v1", *chunks)).digest()


def _name_of(header: Header, query: EncryptedPairTotal) -> str:
    """Return the name of a call's sums in the authority's records."""
    return f"{header.step} {query.purpose}"
