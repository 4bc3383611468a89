"""The server's half of the agreement on the mask seed, which it relays and cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty, Response, Rows, Shared, select
from securecluster.privacy.masking.key_agreement import Peers, SealedSeed
from securecluster.runtime.port import KeyMessage, KeyMessages, Port


class MaskKeys:
    """Relay of the key agreement.

    Args:
        most_peers: the most peers of one frame, the number of clients of the run.
    """

    _port: Port

    def __init__(self, most_peers: int) -> None:
        self._most_peers = most_peers

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: its state has the ids of the clients with the seed.
        """
        self._port = port

    def ready(self, clients: Sequence[int], *beside: KeyMessages) -> list[int]:
        """Return the clients that have the seed, after an agreement with those that do not.

        Args:
            clients: ids of the clients of the next call; who does not reply joins at a later one.
            *beside: exchanges of other keys, which go out together with an agreement.
        """
        keyed = set(self._port.state().keyed)
        newcomers = [client for client in clients if client not in keyed]
        if newcomers:
            self._port.together(self._agreement(newcomers), *beside)
        keyed = set(self._port.state().keyed)
        return [client for client in clients if client in keyed]

    def _agreement(self, newcomers: Sequence[int]) -> KeyMessages:
        """Yield the messages of a key agreement with some clients."""
        offers = yield self._message("key_offer", newcomers, Empty())
        # One frame names at most as many peers as the run has clients, however many join.
        positions = range(len(offers.ids))
        for first in positions[:: self._most_peers]:
            block = slice(first, first + self._most_peers)
            reply = select(offers.reply, positions[block])
            yield from self._agreement_of(Response(offers.ids[block], reply))

    def _agreement_of(self, offers: Response) -> KeyMessages:
        """Yield the messages that distribute the seed: the first leader that replies seals it.

        Args:
            offers: the clients' public keys.
        """
        peers = offers.ids
        query = Peers(
            ids=Shared(torch.as_tensor(peers)),
            keys=Shared(offers.reply.key.values),
            signatures=Shared(offers.reply.signature.values),
        )
        for leader in self._leaders(offers):
            sealed = (yield self._message("key_seal", [leader], query)).reply
            if sealed is None:
                continue
            # a batch of one frame, the leader's, with one row per peer
            message = SealedSeed(
                leader=leader,
                key=Shared(sealed.key.values[0]),
                ciphertext=Rows(sealed.ciphertexts.values[0]),
                signature=Rows(sealed.signatures.values[0]),
            )
            opened = yield self._message("key_open", peers, message)
            state = self._port.state()
            state.keyed = sorted({*state.keyed, *opened.ids})
            return

    def _leaders(self, offers: Response) -> list[int]:
        """Return the clients that may lead the key agreement, in the order to try them.

        A client that has the run's seed must lead, or peers would end with different seeds. Without
        one, clients that report a seed come first: a resumed server finds the seed in use.
        """
        keyed = self._port.state().keyed
        if keyed:
            return keyed
        flags = offers.reply.seeded.values.tolist()
        seeded = dict(zip(offers.ids, flags, strict=True))
        return sorted(offers.ids, key=lambda client: not seeded[client])

    def _message(self, method: str, to: Sequence[int], query: Any) -> KeyMessage:
        """Return a message of the key agreement, which has numbers of its own."""
        state = self._port.state()
        state.key_step += 1
        # The seed is of the run: local parameter servers have no part in it.
        return KeyMessage(method, to, query, state.key_step, from_server=True)
