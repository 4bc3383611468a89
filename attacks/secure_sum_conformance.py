"""Conformance of clients in secure sums: which rules a server can break that does not follow them.

A client of a secure sum relies on rules that it enforces itself (Bonawitz et al. 2017, Sections 4
and 6): it takes the keys that their owners signed, masks one row in an attempt, and reveals of each
other client either the key of their pads or the share of its seed, for one list of survivors. The
attack sends real clients what a lying server would send, one lie at a time, each after an honest
start. A rule holds if the client refuses; whatever else it does, the rule is broken.

The frames of the honest start are those that the server of the run sent, so the lies differ from
them in nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import Attack, Guess, Knowledge, Truth, View
from securecluster.attacks.experiments import Probed, probe
from securecluster.attacks.scoring import Scorer
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Call, Picks, format_ids
from securecluster.messaging.transcript import ObservedMessage
from securecluster.privacy.secure_sum.pads import KEY, KeyPair
from securecluster.runtime.endpoint import SUM, Endpoint, config_hash
from securecluster.runtime.key_exchange import offer_statement
from securecluster.runtime.secure_sum_client import LostMembers

Array = NDArray[Any]
FEWEST = 5  # clients, for lists of survivors that differ and are both long enough
VICTIM = 0  # position of the client that is lied to


class BrokenRules(Scorer):
    """Number of rules that the clients break."""

    metric = "rules of secure sums that a client breaks"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the number of broken rules as the only unit, (1,).

        Args:
            guess: True by rule where a client refused.
            truth: not used: what clients do is observed.
        """
        broken = [not held for held in guess.values.values()]
        return np.array([float(sum(broken))])

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return zero, (1,): a server that follows the protocol is answered, and breaks no rule.

        Args:
            guess: not used.
            truth: not used.
            draw: not used.
        """
        return np.zeros(1)


@dataclass(frozen=True)
class Frames:
    """The honest server's requests of the first secure sum of a run.

    Args:
        keys: calls that bring the keys, one for each client.
        rows: calls for the rows, one for each client.
        shares: calls for the shares, one for each client.
    """

    keys: tuple[Call, ...]
    rows: tuple[Call, ...]
    shares: tuple[Call, ...]


Lie = Callable[["Server"], Iterator[Call]]


class SecureSumConformance(Attack):
    """Rules of secure sums that clients do not enforce against a lying server.

    Args:
        endpoint: of the clients, as they are before the run; without it the attack is not
            applicable.
    """

    name = "secure-sum-conformance"
    source = "Bonawitz et al. 2017, Practical Secure Aggregation, Sections 4 and 6 (active server)"
    needs = "an active server that clients answer, and secure sums by masks"
    scorer = BrokenRules()

    def __init__(self, endpoint: Endpoint[Any] | None = None) -> None:
        self.endpoint = endpoint

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.config.get("aggregation", "plain") != "secagg":
            return "not applicable: the run has no secure sums, so there are no rules to break"
        if self.endpoint is None:
            return "not applicable: the adversary only observed, and sent no calls of its own"
        frames = first_sum(view, knowledge)
        if frames is None or len(frames.rows) < FEWEST:
            return f"not applicable: no sum over {FEWEST} clients or more was observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return for each rule whether the client refused; its sentences are in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        frames = first_sum(view, knowledge)
        assert self.endpoint is not None and frames is not None
        server = Server(self.endpoint, frames)
        held = {}
        sentences = {}
        for rule, lie in LIES.items():
            answer = server.tell(lie)
            held[rule] = answer.refused
            sentences[rule] = str(answer.refusal) if answer.refused else "the client answered"
        return Guess("rules of secure sums", held, {"sentences": sentences})


class Server:
    """A server that follows the protocol up to some point, and then lies to one client.

    Args:
        endpoint: of the clients.
        frames: what the honest server sent.
    """

    def __init__(self, endpoint: Endpoint[Any], frames: Frames) -> None:
        self.endpoint = endpoint
        self.frames = frames
        # The secrets of clients have all that they remember of sums.
        self._fresh = copy.deepcopy(endpoint.keys.secrets)

    def tell(self, lie: Lie) -> Probed:
        """Return the client's refusal, or what it did with the last request.

        Args:
            lie: yields requests: honest ones in their order, and at least one that is not.

        Raises:
            SecureClusterError: the client refused an honest request before any other.
        """
        self.endpoint.keys.secrets = copy.deepcopy(self._fresh)
        in_order = (self.keys, self.row, self.shares, None)
        lied = False
        for position, call in enumerate(lie(self)):
            lied = lied or call is not in_order[position]
            answer = probe(self.endpoint, call)
            if answer.refusal is not None:
                if not lied:
                    raise answer.refusal
                break
        return answer

    @property
    def keys(self) -> Call:
        """Return the honest request that brings the client the keys of the others."""
        return self.frames.keys[VICTIM]

    @property
    def row(self) -> Call:
        """Return the honest request for the client's row."""
        return self.frames.rows[VICTIM]

    @property
    def shares(self) -> Call:
        """Return the honest request for the client's shares."""
        return self.frames.shares[VICTIM]

    @property
    def clients(self) -> tuple[int, ...]:
        """Return the members of the sum, ascending."""
        return tuple(sorted(call.to[0] for call in self.frames.rows))

    @property
    def others(self) -> list[int]:
        """Return the members but the client that is lied to."""
        return [client for client in self.clients if client != self.row.to[0]]

    def asked_among(self, members: list[int]) -> Call:
        """Return the request for the client's row in a sum over other members.

        Args:
            members: ascending.
        """
        text = (format_ids(members),)
        return dataclasses.replace(self.row, group=text, members=(len(members),))

    def pads(self, lost: list[int]) -> Call:
        """Return a request for the pad keys with lost clients.

        Args:
            lost: ascending.
        """
        query = LostMembers(self.row.method, _picks(lost))
        return dataclasses.replace(self.shares, method="reveal_pads", query=query)

    def shares_without(self, lost: list[int]) -> Call:
        """Return a request for shares of all survivors but some.

        Args:
            lost: ascending.
        """
        query = self.shares.query
        boxes = query.boxes.table[list(query.boxes.picks[0])]
        # the boxes of the others, in ascending order of these
        alive = [k for k, other in enumerate(self.others) if other not in lost]
        picks = Picks(boxes[alive], (tuple(range(len(alive))),))
        changed = dataclasses.replace(query, lost=_picks(lost), boxes=picks)
        return dataclasses.replace(self.shares, query=changed)

    def with_key(self, position: int, key: bytes, signed: bool = False) -> Call:
        """Return the request that brings the keys, with another key in one place.

        Args:
            position: place of the key.
            key: 32 bytes.
            signed: True if the key's owner colludes, and signs it.
        """
        query = self.keys.query
        keys = _with_row(query.keys, position, key)
        signatures = query.signatures
        if signed:
            owner = int(query.ids.table[position])
            statement = offer_statement(self.row.config.encode(), owner, key)
            signatures = _with_row(signatures, position, self.endpoint.keys.sign(owner, statement))
        changed = dataclasses.replace(query, keys=keys, signatures=signatures)
        return dataclasses.replace(self.keys, query=changed)


def first_sum(view: View, knowledge: Knowledge) -> Frames | None:
    """Return the requests of the first secure sum that a server sent; None without one.

    Args:
        view: what the server observed.
        knowledge: of the configuration.
    """
    requests = [message for message in view.messages() if message.receiver.kind == "client"]
    rows = [message for message in requests if message.verb == SUM]
    if not rows:
        return None
    step = rows[0].step
    rows = [message for message in rows if message.step == step]
    keys = [message for message in requests if message.method == "sum_keys"]
    shares = [m for m in requests if m.method == "reveal_shares" and m.step == step]
    members = sorted(_number(message) for message in rows)
    # a client that was lost on the way has fewer frames: the attack needs a sum without losses
    if not len(rows) == len(shares) <= len(keys):
        return None
    by_client = {_number(message): message for message in reversed(keys)}
    return Frames(
        keys=tuple(_call(by_client[_number(m)], knowledge, ()) for m in rows),
        rows=tuple(_call(message, knowledge, members) for message in rows),
        shares=tuple(_call(message, knowledge, members) for message in shares),
    )


def _number(message: ObservedMessage) -> int:
    number = message.receiver.index
    assert number is not None
    return number


def _call(message: ObservedMessage, knowledge: Knowledge, members: Any) -> Call:
    """Return a request as a call to one client."""
    group = (format_ids(members),) if members else ()
    return Call(
        config=config_hash(knowledge.config),
        method=message.method,
        verb=message.verb,
        round=message.round,
        step=message.step,
        to=(_number(message),),
        query=message.content,
        members=(max(1, len(members)),),
        group=group,
    )


def _with_row(field: Picks, position: int, row: bytes) -> Picks:
    """Return a field of bytes with another row in one place."""
    table = field.table.clone()
    table[position] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    return Picks(table, field.picks)


def _picks(ids: list[int]) -> Picks:
    return Picks(torch.tensor(ids, dtype=torch.int64), (tuple(range(len(ids))),))


# --- keys ---


def _own_key(server: Server) -> Iterator[Call]:
    yield server.with_key(1, KeyPair(bytes(range(KEY))).public)


def _swapped_keys(server: Server) -> Iterator[Call]:
    query = server.keys.query
    swapped = query.keys.table.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    changed = dataclasses.replace(query, keys=Picks(swapped, query.keys.picks))
    yield dataclasses.replace(server.keys, query=changed)


def _duplicate_key(server: Server) -> Iterator[Call]:
    other = bytes(server.keys.query.keys.table[2].tolist())
    yield server.with_key(1, other, signed=True)


def _low_order_key(server: Server) -> Iterator[Call]:
    yield server.with_key(1, bytes(KEY), signed=True)
    yield server.row


def _replaced_key(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.with_key(2, KeyPair(bytes(range(KEY))).public, signed=True)


# --- rows ---


def _lone_sum(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.asked_among([server.row.to[0]])


def _foreign_sum(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.asked_among(server.others)


def _unknown_member(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.asked_among([*server.clients, max(server.clients) + 1])


def _plain_sum(server: Server) -> Iterator[Call]:
    yield server.keys
    yield dataclasses.replace(server.row, group=())


def _row_without_keys(server: Server) -> Iterator[Call]:
    yield server.row


def _another_run(server: Server) -> Iterator[Call]:
    yield server.keys
    yield dataclasses.replace(server.row, config="0" * len(server.row.config))


def _two_rows(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield server.asked_among(list(server.clients)[:-1])


def _earlier_attempt(server: Server) -> Iterator[Call]:
    yield server.keys
    yield dataclasses.replace(server.row, attempt=1)
    yield server.row


# --- shares and pads ---


def _shares_without_row(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.shares


def _two_lists(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield server.shares
    yield server.shares_without([server.others[-1]])


def _pads_and_shares(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield server.pads([server.others[-1]])
    yield server.shares


def _pads_after_shares(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield server.shares
    yield server.pads([server.others[-1]])


def _few_survivors(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield server.shares_without(server.others[1:])


def _client_called_lost(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    lost = [server.row.to[0]]
    yield server.pads(lost)


def _other_attempt(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield dataclasses.replace(server.shares, attempt=1)


def _other_call(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    yield dataclasses.replace(server.shares, step=server.shares.step + 1)


def _altered_box(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    query = server.shares.query
    table = query.boxes.table.clone()
    table[query.boxes.picks[0][0], 0] ^= 1
    changed = dataclasses.replace(query, boxes=Picks(table, query.boxes.picks))
    yield dataclasses.replace(server.shares, query=changed)


def _missing_box(server: Server) -> Iterator[Call]:
    yield server.keys
    yield server.row
    query = server.shares.query
    fewer = Picks(query.boxes.table, (query.boxes.picks[0][:-1],))
    yield dataclasses.replace(server.shares, query=dataclasses.replace(query, boxes=fewer))


LIES: dict[str, Lie] = {
    "a key that the server made is refused": _own_key,
    "keys of two clients are not swapped": _swapped_keys,
    "two clients do not have one key": _duplicate_key,
    "no row leaves under a key of low order": _low_order_key,
    "a key stays for the whole run": _replaced_key,
    "a client sums with others": _lone_sum,
    "a client is a member of its sum": _foreign_sum,
    "all members have keys": _unknown_member,
    "no row leaves for a plain sum": _plain_sum,
    "no row leaves before the keys": _row_without_keys,
    "a row is of this run": _another_run,
    "an attempt has one row": _two_rows,
    "an earlier attempt is over": _earlier_attempt,
    "shares need a row": _shares_without_row,
    "shares are for one list of survivors": _two_lists,
    "no share of a client whose pads are open": _pads_and_shares,
    "no pads of a client whose share is open": _pads_after_shares,
    "few survivors are refused": _few_survivors,
    "a client knows that its own row arrived": _client_called_lost,
    "shares are of one attempt": _other_attempt,
    "shares are of one call": _other_call,
    "an altered box is refused": _altered_box,
    "every survivor has a box": _missing_box,
}
