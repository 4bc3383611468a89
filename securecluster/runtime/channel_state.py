"""What the server's side of the network stores in checkpoints: counts, public keys, the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from securecluster.messaging.messages import FIRST_SEPARATE_STEP
from securecluster.privacy.dp.ledger import Event, Ledger


@dataclass
class SumOffer:
    """Public key of a client, as the server relays it."""

    client: int
    key: bytes
    signature: bytes


@dataclass
class KeyDirectory:
    """Public keys that clients offered, and which of them each client has received.

    Args:
        offers: offers in the order in which they came.
        told: number of the first offers whose root a client has received, by its id.
        sent: ids of the clients whose keys a client has received, by its id.
    """

    offers: list[SumOffer] = field(default_factory=list)
    told: dict[int, int] = field(default_factory=dict)
    sent: dict[int, list[int]] = field(default_factory=dict)

    @property
    def keys(self) -> dict[int, bytes]:
        """Return the public keys by client id."""
        return {offer.client: offer.key for offer in self.offers}


@dataclass
class KeyRecord:
    """Public keys of the key authority, and the clients that have received them.

    Attributes:
        public: public key of the encryption; empty before the first exchange.
        exchange: public key for envelopes.
        signature: of both.
        told: ids of the clients.
    """

    public: bytes = b""
    exchange: bytes = b""
    signature: bytes = b""
    told: list[int] = field(default_factory=list)


@dataclass
class ChannelState:
    """State of the server's side of the network, stored in checkpoints.

    Attributes:
        step: number of calls to protocol methods. Batches and masks are drawn from it, so the key
            agreement is counted apart: masked and plain runs then draw the same batches.
        key_step: number of calls of the key agreement.
        post_step: number of the last call of `ServerChannel.post`.
        keyed: ids of the clients that have the mask seed, in ascending order.
        sum_step: number of calls of the exchanges of public keys.
        sum_keys: public keys by which pairs of clients agree on pads.
        encryption: public keys of the key authority, by encryption scheme.
        lost: rounds in which a client did not reply, by client id.
        refused: rounds in which a client refused a request, by client id and the refusal's code.
        ledger: events of everything that clients released.
        unpriced: calls with clients that may have released what was asked for, of which nobody has
            replied to that method yet (`release_billing`).
        sum_lists: clients of secure sums, of those alone whose lists are no combination of earlier
            ones: the row space of all of them is theirs.
        smallest_sums: members of the smallest secure sum that a client was in, by its id.
        scale: means and deviations of features over all clients, on public bounds; empty where the
            run finds none.
        scaled: ids of the clients that have received it.
    """

    step: int = 0
    key_step: int = 0
    post_step: int = FIRST_SEPARATE_STEP
    keyed: list[int] = field(default_factory=list)
    sum_step: int = 0
    sum_keys: KeyDirectory = field(default_factory=KeyDirectory)
    encryption: dict[str, KeyRecord] = field(default_factory=dict)
    lost: dict[int, list[int]] = field(default_factory=dict)
    refused: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    unpriced: list[Event] = field(default_factory=list)
    sum_lists: list[list[int]] = field(default_factory=list)
    smallest_sums: dict[int, int] = field(default_factory=dict)
    scale: list[list[float]] = field(default_factory=list)
    scaled: list[int] = field(default_factory=list)
