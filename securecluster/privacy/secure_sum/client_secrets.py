"""What clients keep between the secure sums of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from securecluster.privacy.secure_sum.double_mask import GuardState
from securecluster.privacy.secure_sum.pair_pads import PairState

# calls of which a client keeps what it allowed; it refuses older ones
KEPT_CALLS = 64


@dataclass
class SumSecrets:
    """Keys and records of the clients of one endpoint, by client id; never printed.

    Args:
        private: X25519 private keys.
        masks: keys of the self masks.
        public: public keys of all clients of the run, as the server relayed them.
        guards: what each client has sent and revealed.
        floors: number of the first call that a client still answers.
        pairs: what each client has sent in padded pairs.
    """

    private: dict[int, bytes] = field(default_factory=dict, repr=False)
    masks: dict[int, bytes] = field(default_factory=dict, repr=False)
    public: dict[int, bytes] = field(default_factory=dict)
    guards: dict[int, GuardState] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    pairs: dict[int, PairState] = field(default_factory=dict)

    def of(self, client: int) -> SumSecrets:
        """Return the secrets of one client alone, and the public keys of all.

        Args:
            client: id of the client.
        """
        alone = SumSecrets(public=dict(self.public))
        if client in self.private:
            alone.private[client] = self.private[client]
        if client in self.masks:
            alone.masks[client] = self.masks[client]
        if client in self.guards:
            alone.guards[client] = self.guards[client]
        if client in self.floors:
            alone.floors[client] = self.floors[client]
        if client in self.pairs:
            alone.pairs[client] = self.pairs[client]
        return alone

    def forget(self, client: int) -> None:
        """Drop a client's records of all but its last `KEPT_CALLS` calls.

        Args:
            client: id of the client.
        """
        state = self.guards[client]
        calls = sorted(state.attempts)
        for call in calls[:-KEPT_CALLS]:
            del state.attempts[call]
            self.floors[client] = call + 1
