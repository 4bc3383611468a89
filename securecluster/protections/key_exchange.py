"""Exchange of the public keys by which pairs of clients agree on pads, once a run.

`sum_offer` brings a client's signed X25519 key to the server, and `sum_keys` those of the others to
each client. Secure sums and padded pairs share the exchange and the keys; the keys of pairs that
follow from them are apart by purpose.

Clients verify each key that is relayed to them, whatever the server did. The server verifies keys
as well, before it relays them: a client refuses a message with a single wrong key, so otherwise one
client could drop all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.bounds import Octets, Upto, Whole
from securecluster.messaging.messages import Ack, Call, Empty, Picks, Rows
from securecluster.messaging.octets import as_bytes, as_rows, as_table
from securecluster.messaging.refusals import FRAME
from securecluster.privacy.masking import key_agreement, pads
from securecluster.privacy.masking.identities import MOST_CLIENTS, SIGNATURE
from securecluster.privacy.masking.key_agreement import PublicKey
from securecluster.privacy.masking.pads import (
    KEY,
    KeyPair,
    check_order,
    check_public_keys,
    transcript,
)
from securecluster.runtime.channel_state import KeyDirectory, SumOffer
from securecluster.runtime.port import TRIES, KeyMessage, KeyMessages, Port
from securecluster.runtime.services import MessageTypes

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster
    from securecluster.privacy.masking.key_agreement import KeyRing

OFFERS = Upto("offers", "clients", minimum=1)


@dataclass(frozen=True, eq=False)
class SumKey:
    """Client's offer to the server."""

    key: Annotated[Rows, Octets((KEY,))]  # (b, 32) uint8, X25519
    signature: Annotated[Rows, Octets((SIGNATURE,))]  # (b, 64) uint8, zeros without an identity


@dataclass(frozen=True, eq=False)
class SumKeys:
    """Server's message to a client: the keys that it has not received yet."""

    ids: Annotated[Picks, Whole((OFFERS,), below=MOST_CLIENTS)]  # (k,) int64
    keys: Annotated[Picks, Octets((OFFERS, KEY))]  # (k, 32) uint8
    signatures: Annotated[Picks, Octets((OFFERS, SIGNATURE))]  # (k, 64) uint8, of the keys


EXCHANGE_METHODS: Mapping[str, MessageTypes] = {
    "sum_offer": (Empty, SumKey),
    "sum_keys": (SumKeys, Ack),
}


class KeyExchange:
    """The part of one endpoint's clients in the exchange, and the keys of pairs.

    Args:
        run: hash of the run's configuration.
        keys: the clients' identities, roster and secrets.
        purpose: what the keys of pairs are for; those of two purposes are independent.
    """

    def __init__(self, run: bytes, keys: KeyRing, purpose: str) -> None:
        self._run = run
        self._keys = keys
        self._purpose = purpose
        # pair -> public keys of both, and key of the pair; an endpoint with both computes it once
        self._pair_keys: dict[tuple[int, int], tuple[tuple[bytes, bytes], bytes]] = {}
        # owners of the points of the public keys that were checked
        self._points: dict[int, int] = {}
        self._pairs: dict[int, KeyPair] = {}

    @property
    def public(self) -> Mapping[int, bytes]:
        """Return the public keys that the server has relayed, by client id."""
        return self._keys.secrets.pairwise.public

    def answer(self, call: Call) -> Any:
        """Return the clients' reply to a call of the exchange.

        Args:
            call: requests to clients of the endpoint.

        Raises:
            FrameError: a message that was tampered with.
        """
        if call.method == "sum_offer":
            return self._offer(call.to)
        return self._take_keys(call)

    def check_members(self, client: int, members: Sequence[int]) -> None:
        """Raise PolicyError for members whose keys were not relayed.

        Args:
            client: id of the client.
            members: ids of the members of a sum.
        """
        strangers = [member for member in members if member not in self.public]
        if strangers:
            raise PolicyError(
                f"client {client} has no key of client {strangers[0]}, so it takes part in no "
                "secure sum with it"
            )

    def pair_key(self, client: int, peer: int) -> bytes:
        """Return the key that a client shares with another one, 32 bytes.

        Args:
            client: id of the client.
            peer: id of the other client, whose key was relayed.

        Raises:
            FrameError: an invalid key.
        """
        pair = self._pair(client)
        peer_public = self.public[peer]
        ends, publics = (client, peer), (pair.public, peer_public)
        if peer < client:
            ends, publics = (peer, client), (peer_public, pair.public)
        known = self._pair_keys.get(ends)
        if known is None or known[0] != publics:
            key = pair.pair_key(client, peer, peer_public, self._run, self._purpose)
            known = self._pair_keys[ends] = (publics, key)
        return known[1]

    def _offer(self, clients: Sequence[int]) -> SumKey:
        """Return the signed public keys of some clients."""
        keys = []
        signatures = []
        for client in clients:
            public = self._pair(client).public
            keys.append(public)
            signatures.append(self._keys.sign(client, self._statement(client, public)))
        return SumKey(Rows(as_table(keys, KEY)), Rows(as_table(signatures, SIGNATURE)))

    def _take_keys(self, call: Call) -> Ack:
        """Store the public keys of other clients, which no later message can replace.

        Raises:
            FrameError: a key that its client did not sign, or another one than before, or one that
                no honest server relays.
        """
        query: SumKeys = call.query
        public_keys = self._keys.secrets.pairwise.public
        if len(self._points) != len(public_keys):  # they come from a checkpoint
            self._points = {pads.point(key): client for client, key in public_keys.items()}
        for k, recipient in enumerate(call.to):
            if k and query.ids.picks[k] == query.ids.picks[k - 1]:
                # the same keys as the last recipient's, which were verified
                self._check_own(recipient, {})
                continue
            picks = list(query.ids.picks[k])
            ids = query.ids.table[picks].tolist()
            keys = as_rows(query.keys.table[picks])
            signatures = as_rows(query.signatures.table[picks])
            relayed = dict(zip(ids, keys, strict=True))
            if len(relayed) < len(ids):
                raise FrameError("the keys of a secure sum name a client twice")
            for client, key, signature in zip(ids, keys, signatures, strict=True):
                if public_keys.get(client, key) != key:
                    raise FrameError(
                        f"client {recipient} was sent another key of client {client} than before: "
                        "the keys were tampered with, start a new run"
                    )
                if client not in public_keys:
                    self._keys.verify(client, self._statement(client, key), signature)
            fresh = {c: key for c, key in relayed.items() if c not in public_keys}
            self._check_own(recipient, fresh)
            public_keys.update(fresh)
            self._points.update({pads.point(key): client for client, key in fresh.items()})
        return Ack()

    def _check_own(self, recipient: int, fresh: Mapping[int, bytes]) -> None:
        """Raise FrameError for keys that no honest server relays to a client.

        Args:
            recipient: id of the client.
            fresh: keys beside those that were checked before.
        """
        own = self.public.get(recipient)
        keys = fresh if own is None else {**fresh, recipient: own}
        check_public_keys(keys, recipient, self._pair(recipient).public, self._points)

    def _pair(self, client: int) -> KeyPair:
        """Return a client's X25519 keys, drawn once a run."""
        private = self._keys.secrets.pairwise.private
        if client not in private:
            private[client] = self._keys.secret(client, "secure sum x25519")
        if client not in self._pairs:
            self._pairs[client] = KeyPair(private[client])
        return self._pairs[client]

    def _statement(self, client: int, public: bytes) -> bytes:
        return offer_statement(self._run, client, public)


def offer_statement(run: bytes, client: int, public: bytes) -> bytes:
    """Return what a client signs when it offers its key: it holds for one run and client.

    Args:
        run: hash of the run's configuration.
        client: id of the client.
        public: its public key, 32 bytes.
    """
    return transcript("securecluster secure sum offer v1", run, client, public)


def check_offer(run: str, client: int, reply: Any, roster: Roster | None) -> None:
    """Raise FrameError for a client's public key that no other client would take.

    Args:
        run: hash of the run's configuration.
        client: id of the client.
        reply: its reply to a call; one without a public key is not looked at.
        roster: whose signatures count; None verifies none.
    """
    if not isinstance(reply, SumKey | PublicKey):
        return
    key = as_bytes(reply.key.row(0))
    check_order(key)
    if roster is None:
        return
    if isinstance(reply, SumKey):
        statement = offer_statement(run.encode(), client, key)
    else:
        statement = key_agreement.offer_statement(run.encode(), client, key)
    roster.check(client, statement, as_bytes(reply.signature.row(0)))


class KeyRelay:
    """The server's half of the exchange.

    Attributes:
        port: the channel's, whose state has the keys.
    """

    port: Port

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: sends the messages of the exchange.
        """
        self.port = port

    @property
    def directory(self) -> KeyDirectory:
        """Return the keys that clients offered."""
        return self.port.state().sum_keys

    def ready(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that have the keys of each other, after an exchange where needed.

        Args:
            clients: ids of the clients of the next sums.
        """
        refused: set[int] = set()
        for _ in range(TRIES):
            silent = [client for client in self._silent(clients) if client not in refused]
            if not silent:
                break
            self.port.together(self._offers(silent, refused))
        for _ in range(TRIES):
            behind = self._behind(clients)
            if not behind:
                break
            self.port.together(self._relayed(behind))
        directory = self.directory
        last = len(directory.offers)
        return [client for client in clients if directory.told.get(client) == last]

    def beside(self, clients: Sequence[int]) -> KeyMessages:
        """Yield one request for the keys of each client, and one message with those of the others.

        Args:
            clients: ids of the clients of the next call.
        """
        if silent := self._silent(clients):
            yield from self._offers(silent, set())
        if behind := self._behind(clients):
            yield from self._relayed(behind)

    def _silent(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that have offered no key yet."""
        offered = self.directory.keys
        return [client for client in clients if client not in offered]

    def _offers(self, clients: Sequence[int], refused: set[int]) -> KeyMessages:
        """Yield the request for the keys of some clients, and store those that arrive.

        Args:
            clients: ids of the clients.
            refused: takes the ids of those whose keys are of no use.
        """
        response = yield self._message("sum_offer", clients, Empty())
        refused.update(client for client, code in response.refused.items() if code == FRAME)
        if response.reply is None:
            return
        keys = response.reply.key.values
        signatures = response.reply.signature.values
        owners = {pads.point(offer.key): offer.client for offer in self.directory.offers}
        for client, key, signature in zip(response.ids, keys, signatures, strict=True):
            offer = SumOffer(client, as_bytes(key), as_bytes(signature))
            try:
                check_public_keys({}, client, offer.key, owners)
            except FrameError as error:
                # it came later than the key that it copies, which a client knows once it is relayed
                self.port.refuse(error, [client])
                refused.add(client)
            else:
                self.directory.offers.append(offer)
                owners[pads.point(offer.key)] = client

    def _behind(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that offered a key and lack one of another client."""
        directory = self.directory
        offered = directory.keys
        last = len(directory.offers)
        return [c for c in clients if c in offered and directory.told.get(c, 0) < last]

    def _relayed(self, clients: Sequence[int]) -> KeyMessages:
        """Yield the message with the keys of the others, and store who has received them."""
        directory = self.directory
        last = len(directory.offers)
        picks = tuple(tuple(range(directory.told.get(c, 0), last)) for c in clients)
        ids = torch.tensor([offer.client for offer in directory.offers])
        keys = as_table([offer.key for offer in directory.offers], KEY)
        signatures = as_table([offer.signature for offer in directory.offers], SIGNATURE)
        query = SumKeys(Picks(ids, picks), Picks(keys, picks), Picks(signatures, picks))
        response = yield self._message("sum_keys", clients, query)
        for client in response.ids:
            directory.told[client] = last

    def _message(self, method: str, to: Sequence[int], query: Any) -> KeyMessage:
        """Return a message of the exchange."""
        state = self.port.state()
        state.sum_step += 1
        return KeyMessage(method, to, query, state.sum_step, from_server=False)
