"""Exchange of the public keys by which pairs of clients agree on pads, once a run.

`sum_offer` brings a client's signed X25519 key to the server. `sum_keys` brings each client the
keys that it lacks of its neighbours in the coming sums, and the root of a Merkle tree over all keys
that were offered (`key_tree`). Secure sums and padded pairs share the exchange and the keys; the
keys of pairs that follow from them are apart by purpose.

Clients verify each key that is relayed to them, whatever the server did. The server verifies keys
as well, before it relays them: a client refuses a message with a single wrong key, so otherwise one
client could drop all others.

*What the root is for.* Graphs of sums are drawn by it, and it is part of the context that pads,
covers and seeds of a sum follow from. So clients that were told two roots have no pad and no cover
in common: each is as good as lost to the other, nothing of theirs cancels or opens, and what is
shown of the survivors of one root holds for each (`UnmaskingGuard`). A signature of the root would
say no more. A client is sent the path of its own key, without which it takes no root: a server
cannot draw the graph before it has that key.

*Why paths of neighbours' keys are not sent.* They take about log2(n / k) hashes a key, and make a
message of k = 160 keys of n = 5,000 clients 2.5 times as long. With a roster they add nothing: the
key is the one that its client signed, for this run. Without one a server may hand each client a
tree in which all other keys are its own, so paths protect from nobody.

*A root may change*, where later clients offer keys, or a server that was restarted asks anew. What
a client has allowed is kept by context: under another root it neither opens an attempt of an
earlier one nor masks a second row in it, and rows that never change are opened over one list,
whatever the root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.bounds import Octets, Upto, Whole
from securecluster.messaging.messages import Ack, Call, Empty, Picks, Rows, Shared
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
from securecluster.protections.key_tree import NODE, KeyTree, root_of
from securecluster.runtime.channel_state import KeyDirectory, SumOffer
from securecluster.runtime.port import TRIES, KeyMessage, KeyMessages, Lists, Port
from securecluster.runtime.services import MessageTypes

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster
    from securecluster.privacy.masking.key_agreement import KeyRing

OFFERS = Upto("offers", "clients")
PATH = Upto("path", MOST_CLIENTS.bit_length())
# lists of members, of which the server remembers that they have what they need
KEPT_LISTS = 64
# by the members of a sum and the root: each member's neighbours; None for a sum that is not asked
Neighbours = Callable[[Sequence[int], bytes], Callable[[int], Sequence[int]] | None]


@dataclass(frozen=True, eq=False)
class SumKey:
    """Client's offer to the server."""

    key: Annotated[Rows, Octets((KEY,))]  # (b, 32) uint8, X25519
    signature: Annotated[Rows, Octets((SIGNATURE,))]  # (b, 64) uint8, zeros without an identity


@dataclass(frozen=True, eq=False)
class SumKeys:
    """Server's message to a client: the root, and the keys that it lacks of its neighbours."""

    root: Annotated[Shared, Octets((NODE,))]  # (32,) uint8
    # (d, 32) uint8, beside the nodes from the leaf of the client's own key to the root
    path: Annotated[Picks, Octets((PATH, NODE))]
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

    def root(self, client: int) -> bytes:
        """Return the root that a client was told last, 32 bytes.

        Args:
            client: its id.

        Raises:
            PolicyError: it was told none.
        """
        root = self._keys.secrets.pairwise.roots.get(client)
        if root is None:
            raise PolicyError(
                f"client {client} was told no keys of others, so it takes part in no secure sum"
            )
        return root

    def check_neighbours(self, client: int, neighbours: Collection[int]) -> None:
        """Raise PolicyError for neighbours whose keys were not relayed.

        Args:
            client: id of the client.
            neighbours: ids of those that it shares pads with.
        """
        if not self.public.keys() >= set(neighbours):
            stranger = min(set(neighbours) - self.public.keys())
            raise PolicyError(
                f"client {client} has no key of client {stranger}, so it takes part in no secure "
                "sum with it"
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
        """Store the root, and keys of other clients, which no later message can replace.

        Raises:
            FrameError: a key that its client did not sign, or another one than before, or one that
                no honest server relays, or a root that does not follow from the client's own key.
        """
        query: SumKeys = call.query
        pairwise = self._keys.secrets.pairwise
        if len(self._points) != len(pairwise.public):  # they come from a checkpoint
            self._points = {pads.point(key): client for client, key in pairwise.public.items()}
        root = as_bytes(query.root.value)
        nodes = as_rows(query.path.table)
        for recipient, picks in zip(call.to, query.path.picks, strict=True):
            own = self._pair(recipient).public
            if root_of(self._run, recipient, own, [nodes[row] for row in picks]) != root:
                raise FrameError(
                    f"client {recipient} was told a root of the clients' keys that its own key is "
                    "not in: the keys were tampered with, start a new run"
                )
        fresh = self._fresh(call)
        for recipient in call.to:
            self._check_own(recipient, fresh)
            pairwise.public.update(fresh)
            self._points.update({pads.point(key): client for client, key in fresh.items()})
            fresh = {}
        pairwise.roots.update(dict.fromkeys(call.to, root))
        return Ack()

    def _fresh(self, call: Call) -> dict[int, bytes]:
        """Return the relayed keys that are not known yet, each of them verified once.

        Raises:
            FrameError: a key that its client did not sign, or another one than before.
        """
        query: SumKeys = call.query
        ids = query.ids.table.tolist()
        keys, signatures = as_rows(query.keys.table), as_rows(query.signatures.table)
        fresh: dict[int, bytes] = {}
        # rows that several recipients have in common
        seen: set[int] = set()
        for recipient, picks in zip(call.to, query.ids.picks, strict=True):
            for row in picks:
                if row in seen:
                    continue
                seen.add(row)
                client, key = ids[row], keys[row]
                before = self.public.get(client, fresh.get(client))
                if before is None:
                    self._keys.verify(client, self._statement(client, key), signatures[row])
                    fresh[client] = key
                elif before != key:
                    raise FrameError(
                        f"client {recipient} was sent another key of client {client} than before: "
                        "the keys were tampered with, start a new run"
                    )
        return fresh

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

    Args:
        run: hash of the run's configuration.
        neighbours: whose keys the members of a sum need.

    Attributes:
        port: the channel's, whose state has the keys.
    """

    port: Port

    def __init__(self, run: bytes, neighbours: Neighbours) -> None:
        self._run = run
        self._neighbours = neighbours
        self._made: tuple[list[SumOffer], int, KeyTree] | None = None
        # lists of members of the last sums that need nothing, each with the root
        self._settled: set[tuple[bytes, tuple[int, ...]]] = set()

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

    @property
    def tree(self) -> KeyTree:
        """Return the tree of the keys that were offered."""
        offers = self.directory.offers
        made = self._made
        if made is None or made[0] is not offers or made[1] != len(offers):
            tree = KeyTree(self._run, self.directory.keys)
            self._made = made = (offers, len(offers), tree)
            self._settled.clear()  # also where the state was restored
        return made[2]

    def ready(self, clients: Sequence[int], lists: Lists) -> list[int]:
        """Return the clients that have the keys of their neighbours, after an exchange if needed.

        Args:
            clients: ids of the clients of the next sums.
            lists: members of each of these sums, by the clients that can take part.
        """
        refused: set[int] = set()
        for _ in range(TRIES):
            silent = [client for client in self._silent(clients) if client not in refused]
            if not silent:
                break
            self.port.together(self._offers(silent, refused))
        able = self._offered(clients)
        tries = TRIES
        while lacking := self._lacking(able, lists(able)):
            if tries:
                self.port.together(self._relayed(lacking))
                tries -= 1
            else:  # without these, others are neighbours
                able = [client for client in able if client not in lacking]
                tries = TRIES
        return able

    def beside(self, clients: Sequence[int], lists: Lists) -> KeyMessages:
        """Yield one request for the keys of each client, and one message with those it lacks.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of its sums, by the clients that can take part.
        """
        if silent := self._silent(clients):
            yield from self._offers(silent, set())
        able = self._offered(clients)
        if lacking := self._lacking(able, lists(able)):
            yield from self._relayed(lacking)

    def _offered(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that have offered a key."""
        offered = self.directory.keys
        return [client for client in clients if client in offered]

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

    def _lacking(self, able: Sequence[int], lists: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Return who lacks the root or a neighbour's key, with the ids of those it is sent."""
        lacking: dict[int, list[int]] = {}
        if not self.directory.offers:
            return lacking
        root = self.tree.root
        for members in lists:
            known = (root, tuple(members))
            if known in self._settled:
                continue
            short = self._lacking_of(members, able, root)
            lacking.update(short)
            if not short:
                if len(self._settled) >= KEPT_LISTS:
                    self._settled.clear()
                self._settled.add(known)
        return lacking

    def _lacking_of(
        self, members: Sequence[int], able: Sequence[int], root: bytes
    ) -> dict[int, list[int]]:
        """Return what `_lacking` does, of one sum.

        Where all pairs of the clients that can take part would share keys, they are few, and who
        lacks one is sent all: lists that follow then need no message.
        """
        neighbours = self._neighbours(members, root)
        if neighbours is None:
            return {}
        told, last = self.directory.told, len(self.directory.offers)
        lacking = {client: self._unsent(client, neighbours(client)) for client in members}
        lacking = {c: peers for c, peers in lacking.items() if peers or told.get(c) != last}
        of_all = self._neighbours(able, root) if lacking else None
        if of_all is not None and len(of_all(able[0])) >= len(able) - 1:
            return {client: self._unsent(client, able) for client in lacking}
        return lacking

    def _unsent(self, client: int, peers: Sequence[int]) -> list[int]:
        """Return those of some clients whose keys a client has not received."""
        known = {client, *self.directory.sent.get(client, ())}
        return [peer for peer in peers if peer not in known]

    def _relayed(self, lacking: Mapping[int, Sequence[int]]) -> KeyMessages:
        """Yield the message with the keys that clients lack, and store who has received them."""
        directory = self.directory
        offers = directory.offers
        last = len(offers)
        tree = self.tree
        row_of = {offer.client: row for row, offer in enumerate(offers)}
        picks = tuple(tuple(row_of[peer] for peer in peers) for peers in lacking.values())
        query = SumKeys(
            root=Shared(as_table([tree.root], NODE)[0]),
            path=Picks(as_table(tree.nodes, NODE), tuple(tree.path(client) for client in lacking)),
            ids=Picks(torch.tensor([offer.client for offer in offers]), picks),
            keys=Picks(as_table([offer.key for offer in offers], KEY), picks),
            signatures=Picks(as_table([offer.signature for offer in offers], SIGNATURE), picks),
        )
        response = yield self._message("sum_keys", list(lacking), query)
        for client in response.ids:
            directory.told[client] = last
            directory.sent[client] = [*directory.sent.get(client, ()), *lacking[client]]

    def _message(self, method: str, to: Sequence[int], query: Any) -> KeyMessage:
        """Return a message of the exchange."""
        state = self.port.state()
        state.sum_step += 1
        return KeyMessage(method, to, query, state.sum_step, from_server=False)
