"""Conformance of secure sums: a server that lies to clients, and their answers to each lie.

For each rule a few clients with made-up data follow an honest server, up to the lie. A rule holds
if the client refuses, and its error message is recorded. The clients are those of every run: the
same endpoint, key exchange and guards. The lies do not depend on the run's data, so the attack
needs no transcript.

A server of plain sums need not lie: it reads every single row, which is what each rule prevents.

    python -m securecluster.attacks.secure_sum_conformance

prints the rules. Not tried are graphs of more than 200 clients, and the forgetting of old calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import SUMS, Attack, Guess, Harm, Knowledge, Scorer, Truth, View
from securecluster.attacks.experiments import Probed, probe
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.errors import FrameError
from securecluster.messaging.messages import Call, Picks, Response, Shared, format_ids
from securecluster.messaging.octets import as_bytes, as_rows, as_table
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.privacy.masking.pads import KEY, KeyPair
from securecluster.protections.key_exchange import SumKeys
from securecluster.protections.key_tree import NODE, KeyTree
from securecluster.protections.secure_sums import client as sum_client
from securecluster.protections.secure_sums import graph as sum_graphs
from securecluster.protections.secure_sums import shamir
from securecluster.protections.secure_sums.double_mask import SumContext, commitment, seed_of
from securecluster.protections.secure_sums.messages import LostMembers
from securecluster.protocols.fedavg import FedAvg
from securecluster.runtime.endpoint import GATHER, MINIMUM, Endpoint
from securecluster.runtime.settings import Settings

CLIENTS = 5
EVERYONE = tuple(range(CLIENTS))
SAMPLES = 8
FEATURES = 4
CLASSES = 3
SUM_METHOD = "contribute"  # whose replies are summed
PREPARATION = ("sum_offer", "sum_keys", SUM_METHOD, "reveal_shares")
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 1.0, "placement": "distributed"}
# the clients that a lying server calls are made anew, with the keys of the honest run
SETTINGS = Settings(transcript="full", threads=1, keys_from_seed=True)
HIGHEST_BIT = 128  # of a key's last byte: X25519 ignores it


@dataclass(frozen=True)
class Verdict:
    """Outcome of one lie.

    Args:
        rule: what clients insist on.
        holds: False if the server got what the rule prevents.
        sentence: the client's refusal, or what the server got.
    """

    rule: str
    holds: bool
    sentence: str


@dataclass(frozen=True)
class Plan:
    """An honest run, whose calls a lying server starts from.

    Args:
        protocol: that was run.
        federation: its clients.
        calls: the first honest call of each method.
        later: the honest call for rows of the second round.
    """

    protocol: FedAvg
    federation: Federation
    calls: Mapping[str, Call]
    later: Call


@lru_cache(maxsize=4)
def honest_plan(noise: bool, rounds: int = 2, cohort_size: int = 0) -> Plan:
    """Return an honest run of secure sums over a few clients with random data.

    Args:
        noise: True for sums with shares of noise.
        rounds: of the run; runs with other rounds have another configuration.
        cohort_size: of the run; without cohorts, the rules of single sums show.
    """
    draw = np.random.default_rng(0)
    train: dict[str, Any] = {}
    for client in EVERYONE:
        x = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        train[f"c{client}"] = (x, draw.integers(0, CLASSES, SAMPLES))
    federation = Federation.from_arrays(train, classes=CLASSES, seed=0)
    options: dict[str, Any] = {"rounds": rounds, "epochs": 1, "model": "linear"}
    if noise:
        options.update(NOISE)
    options["cohort_size"] = cohort_size
    protocol = FedAvg(**options, aggregation="secagg", mask="none")
    fitted = type(protocol)(**protocol.get_params()).fit(federation, SETTINGS)
    calls: dict[str, Call] = {}
    rows = []
    for position, entry in enumerate(fitted.transcript_.entries):
        call = fitted.transcript_.content(position)[0]
        calls.setdefault(entry.method, call)
        if entry.method == SUM_METHOD:
            rows.append(call)
    return Plan(protocol, federation, calls, rows[-1])


class LyingServer:
    """A server in front of clients that have answered nothing yet.

    Args:
        noise: True for sums with shares of noise.
        signed: False for clients without a roster, which verify no signature.
        cohort_size: of the run.
    """

    def __init__(self, noise: bool = False, signed: bool = True, cohort_size: int = 0) -> None:
        self.plan = honest_plan(noise, cohort_size=cohort_size)
        self._signed = signed
        self._nodes: dict[int, Endpoint[Any]] = {}

    def node(self, client: int) -> Endpoint[Any]:
        """Return a client's endpoint.

        Args:
            client: its number.
        """
        if client not in self._nodes:
            self._nodes[client] = build_client(
                self.plan.protocol,
                self.plan.federation,
                SETTINGS,
                [client],
                key_source=KeySource(simulated=self._signed),
            )
        return self._nodes[client]

    def call(self, method: str, client: int, /, **changes: Any) -> Call:
        """Return the honest call of a method to one client, with changes.

        Args:
            method: name of the client method.
            client: its number.
            **changes: fields of the call.
        """
        return dataclasses.replace(self.plan.calls[method].select([client]), **changes)

    def ask(self, method: str, client: int, /, **changes: Any) -> Response:
        """Return the answer to a call that no rule forbids.

        Args:
            method: name of the client method.
            client: its number.
            **changes: fields of the call.

        Raises:
            SecureClusterError: the client refuses nevertheless.
        """
        return self.node(client).answer(self.call(method, client, **changes))

    def lie(self, method: str, client: int, /, **changes: Any) -> Probed:
        """Return what a client does with a lie.

        Args:
            method: name of the client method.
            client: its number.
            **changes: fields of the call.
        """
        return probe(self.node(client), self.call(method, client, **changes))

    def prepared(self, upto: str) -> LyingServer:
        """Return this server, after it has asked client 0 honestly.

        Args:
            upto: the last method that it has called.
        """
        last = PREPARATION.index(upto)
        for method in PREPARATION[: last + 1]:
            self.ask(method, 0)
        return self

    def offers(self) -> torch.Tensor:
        """Return the public key that client 0 offers and new ones of others, (clients, 32)."""
        others = [KeyPair(os.urandom(KEY)).public for _ in EVERYONE[1:]]
        public_key = self.ask("sum_offer", 0).reply.key.values
        return torch.cat([public_key, as_table(others, KEY)])

    def keys_query(self, keys: torch.Tensor, client: int = 0, **further: bytes) -> Any:
        """Return the message that relays public keys to one client, under a root that has its own.

        Args:
            keys: (clients, 32) uint8.
            client: its number.
            **further: key of a client that takes no part, for another root.
        """
        call = self.call("sum_keys", client)
        own = as_bytes(self.ask("sum_offer", client).reply.key.values[0])
        known = {**dict(enumerate([*as_rows(keys), *further.values()])), client: own}
        tree = KeyTree(call.config.encode(), known)
        relayed = {
            name: Picks(table, (EVERYONE,))
            for name, table in (
                ("ids", torch.arange(CLIENTS)),
                ("keys", keys),
                ("signatures", call.query.signatures.table),
            )
        }
        path = Picks(as_table(tree.nodes, NODE), (tree.path(client),))
        return SumKeys(root=Shared(as_table([tree.root], NODE)[0]), path=path, **relayed)

    def other_root(self, client: int = 0) -> Any:
        """Return an honest message, but that a client more is in the tree.

        Args:
            client: number of the client that is told.
        """
        keys = self.call("sum_keys", client).query.keys.table
        return self.keys_query(keys, client, sixth=KeyPair(os.urandom(KEY)).public)

    def shares_query(self, client: int, survivors: Collection[int]) -> Any:
        """Return the request for a client's shares of the survivors' seeds.

        Args:
            client: its number.
            survivors: numbers of the survivors.
        """
        honest = self.call("reveal_shares", client).query
        lost = [other for other in EVERYONE if other not in survivors]
        return dataclasses.replace(honest, lost=picks(lost))


def picks(clients: Sequence[int]) -> Picks:
    """Return numbers of clients as one recipient's rows.

    Args:
        clients: their numbers.
    """
    ids = torch.tensor(list(clients), dtype=torch.int64)
    return Picks(ids, (tuple(range(len(clients))),))


def members(clients: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a call that name the members of a sum.

    Args:
        clients: their numbers.
    """
    return {"group": (format_ids(clients),), "members": (len(clients),)}


def lost_query(*clients: int) -> LostMembers:
    """Return the request for the pad keys of lost clients.

    Args:
        *clients: their numbers.
    """
    return LostMembers(SUM_METHOD, picks(clients))


# --- keys ---


def swapped_keys() -> Probed:
    """Relay the keys of two clients in each other's name."""
    server = LyingServer().prepared("sum_offer")
    keys = server.call("sum_keys", 0).query.keys.table.clone()
    keys[[1, 2]] = keys[[2, 1]]
    return server.lie("sum_keys", 0, query=server.keys_query(keys))


def keys_of_another_run() -> Probed:
    """Relay keys with the signatures of another run."""
    server = LyingServer().prepared("sum_offer")
    # valid signatures, of a configuration with another hash
    other = honest_plan(noise=False, rounds=1).calls["sum_keys"].select([0]).query
    honest = server.call("sum_keys", 0).query
    query = dataclasses.replace(other, root=honest.root, path=honest.path)
    return server.lie("sum_keys", 0, query=query)


def own_key() -> Probed:
    """Relay to a client without a roster another key in its own name."""
    server = LyingServer(signed=False)
    keys = server.offers()
    keys[0] = keys[0] ^ 1
    return server.lie("sum_keys", 0, query=server.keys_query(keys))


def duplicate_keys() -> Probed:
    """Relay to a client without a roster one key for two clients."""
    server = LyingServer(signed=False)
    keys = server.offers()
    keys[2] = keys[1]
    return server.lie("sum_keys", 0, query=server.keys_query(keys))


def encoded_twice() -> Probed:
    """Relay to a client without a roster two encodings of one key."""
    server = LyingServer(signed=False)
    keys = server.offers()
    keys[2] = keys[1]
    # bytes differ, but X25519 computes the same shared secret: comparing bytes would miss it
    keys[2, -1] ^= HIGHEST_BIT
    return server.lie("sum_keys", 0, query=server.keys_query(keys))


def low_order_key() -> Probed:
    """Relay to a client without a roster a key whose secret everyone knows."""
    server = LyingServer(signed=False)
    keys = server.offers()
    # zero has low order: its shared secret with every key is zero (RFC 7748, Section 6.1)
    keys[1] = 0
    relayed = server.lie("sum_keys", 0, query=server.keys_query(keys))
    if relayed.refused:
        return relayed
    return server.lie(SUM_METHOD, 0)


def replaced_key() -> Probed:
    """Relay to a client without a roster a second key of another client."""
    server = LyingServer(signed=False)
    keys = server.offers()
    server.ask("sum_keys", 0, query=server.keys_query(keys))
    other = keys.clone()
    other[1, 0] ^= 1
    return server.lie("sum_keys", 0, query=server.keys_query(other))


def root_without_the_client() -> Probed:
    """Tell a client a root that was made before its key was known."""
    server = LyingServer(signed=False)
    query = server.keys_query(server.offers())
    others = dict(enumerate(as_rows(query.keys.table)))
    del others[0]
    tree = KeyTree(server.call("sum_keys", 0).config.encode(), others)
    path = Picks(as_table(tree.nodes, NODE), (tree.path(0),))
    root = Shared(as_table([tree.root], NODE)[0])
    return server.lie("sum_keys", 0, query=dataclasses.replace(query, root=root, path=path))


def wrong_path() -> Probed:
    """Tell a client a root to which the path of its key does not lead."""
    server = LyingServer().prepared("sum_offer")
    query = server.call("sum_keys", 0).query
    nodes = query.path.table ^ 1
    path = dataclasses.replace(query.path, table=nodes)
    return server.lie("sum_keys", 0, query=dataclasses.replace(query, path=path))


def shares_after_another_root() -> Probed:
    """Ask for shares of a sum of an earlier root."""
    server = LyingServer().prepared(SUM_METHOD)
    server.ask("sum_keys", 0, query=server.other_root())
    return server.lie("reveal_shares", 0)


def row_under_another_root() -> Probed:
    """Have a row masked a second time in an attempt, under another root."""
    # its pads and those of the first one are independent, but both sums could be opened
    server = LyingServer().prepared(SUM_METHOD)
    server.ask("sum_keys", 0, query=server.other_root())
    return server.lie(SUM_METHOD, 0)


def two_roots() -> Probed:
    """Tell client 0 another root than the others, which then open its shares in good faith."""
    server = LyingServer()
    revealed = {}
    for client in EVERYONE:
        server.ask("sum_offer", client)
        query = server.call("sum_keys", client).query if client else server.other_root()
        server.ask("sum_keys", client, query=query)
        reply = server.ask(SUM_METHOD, client).reply
        if not client:
            row, root = reply, as_bytes(query.root.value)
    for client in EVERYONE:
        revealed[client] = server.ask("reveal_shares", client).reply.shares.table[0]
    return _opened(server, row, revealed, root)


# --- rows ---


def lone_member() -> Probed:
    """Ask for the sum of one client."""
    # the sum of one row is the row itself
    server = LyingServer().prepared("sum_keys")
    return server.lie(SUM_METHOD, 0, **members([0]))


def plain_sum() -> Probed:
    """Ask a client that masks for its row in a plain sum."""
    server = LyingServer().prepared("sum_keys")
    return server.lie(SUM_METHOD, 0, group=())


def gathered_row() -> Probed:
    """Ask for the row of a sum by itself."""
    server = LyingServer().prepared("sum_keys")
    return server.lie(SUM_METHOD, 0, verb=GATHER, group=())


def second_row() -> Probed:
    """Have another row masked in the same attempt, by sending the model of a later round."""
    server = LyingServer().prepared(SUM_METHOD)
    # two rows under one pad differ by the rows' own difference
    later = server.plan.later.select([0])
    return server.lie(SUM_METHOD, 0, query=later.query)


def second_members() -> Probed:
    """Have a row masked for other members in the same attempt."""
    server = LyingServer().prepared(SUM_METHOD)
    return server.lie(SUM_METHOD, 0, **members(EVERYONE[:-1]))


def older_attempt() -> Probed:
    """Go back to an attempt that a later one replaced."""
    # the members of two open attempts could differ in one client
    server = LyingServer().prepared("sum_keys")
    server.ask(SUM_METHOD, 0, attempt=1)
    return server.lie(SUM_METHOD, 0)


def attempt_after_shares() -> Probed:
    """Ask for a second sum over the same clients once the first is open."""
    # two sums of one call could differ in a single row, if different clients are lost
    server = LyingServer().prepared("reveal_shares")
    return server.lie(SUM_METHOD, 0, attempt=1)


def differing_members() -> Probed:
    """Ask for a sum without one client once the sum with it is open."""
    server = LyingServer().prepared("reveal_shares")
    return server.lie(SUM_METHOD, 0, attempt=1, **members(EVERYONE[:-1]))


def part_of_a_cohort() -> Probed:
    """Ask for a sum over all clients but one, whose cohort is in it otherwise."""
    # sums over ever other clients can be solved for each of them
    server = LyingServer(cohort_size=2).prepared("sum_keys")
    return server.lie(SUM_METHOD, 0, **members(EVERYONE[:-1]))


# --- revealing ---


def pad_then_share() -> Probed:
    """Ask for the share of a client whose pad was revealed."""
    # a row has two masks, from pads and from its seed; with both revealed it lies open
    server = LyingServer().prepared(SUM_METHOD)
    server.ask("reveal_shares", 0, method="reveal_pads", query=lost_query(4))
    return server.lie("reveal_shares", 0)


def share_then_pad() -> Probed:
    """Ask for the pad of a client whose share was revealed."""
    server = LyingServer().prepared("reveal_shares")
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(4))


def second_survivors() -> Probed:
    """Ask one client for shares under two lists of survivors."""
    server = LyingServer().prepared("reveal_shares")
    return server.lie("reveal_shares", 0, query=server.shares_query(0, EVERYONE[:-1]))


def returning_client() -> Probed:
    """Say that a client was lost, and then that another was instead."""
    # pads of both would together open more of a row than one list of survivors may
    server = LyingServer().prepared(SUM_METHOD)
    server.ask("reveal_shares", 0, method="reveal_pads", query=lost_query(4))
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(3))


def few_survivors() -> Probed:
    """Ask for pads when too few clients are said to be left."""
    server = LyingServer().prepared(SUM_METHOD)
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(2, 3, 4))


def own_row_lost() -> Probed:
    """Tell a client that its own row was lost."""
    server = LyingServer().prepared(SUM_METHOD)
    return server.lie("reveal_shares", 0, query=server.shares_query(0, EVERYONE[1:]))


def few_noise_shares() -> Probed:
    """Ask for a sum over fewer clients than its noise was planned for."""
    # each client adds a share of the noise, so fewer clients leave less than ε was computed for
    server = LyingServer(noise=True).prepared(SUM_METHOD)
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(3, 4))


def other_attempt() -> Probed:
    """Ask for shares of an attempt that the client took no part in."""
    server = LyingServer().prepared(SUM_METHOD)
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(4), attempt=1)


def other_call() -> Probed:
    """Ask for pads of a call that the client took no part in."""
    server = LyingServer().prepared(SUM_METHOD)
    step = server.call("reveal_shares", 0).step + 1
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(4), step=step)


def other_members() -> Probed:
    """Ask for pads of a sum over other members."""
    server = LyingServer().prepared(SUM_METHOD)
    others = members(EVERYONE[:-1])
    return server.lie("reveal_shares", 0, method="reveal_pads", query=lost_query(), **others)


def shares_of_another_attempt() -> Probed:
    """Open a row by the shares of a later attempt, which clients reveal in good faith."""
    server = LyingServer()
    rows = {}
    revealed = {}
    for client in EVERYONE:
        server.ask("sum_offer", client)
        server.ask("sum_keys", client)
        rows[client] = server.ask(SUM_METHOD, client).reply
        server.ask(SUM_METHOD, client, attempt=1)
    for client in EVERYONE:
        reply = server.ask("reveal_shares", client, attempt=1).reply
        revealed[client] = reply.shares.table[0]
    return _opened(server, rows[0], revealed)


def isolated_by_lists() -> Probed:
    """Name different survivors to different clients, to open the row of client 0 alone.

    Client 0 is told that the last ones were lost, the first others that client 0 was. If both kinds
    reveal, all pads of client 0 are known, and the last ones still give shares of its seed.
    """
    refusal = None
    # any split of the survivors into two lists will do for the server, so all are tried
    for threshold in range(2, CLIENTS):
        probed = _isolated(threshold)
        if not probed.refused:
            return probed
        refusal = probed.refusal
    return Probed(None, refusal)


def _isolated(threshold: int) -> Probed:
    """Return the seed of client 0 where the first other clients are told that its row was lost.

    Args:
        threshold: number of clients that client 0 is told have survived, itself included.
    """
    server = LyingServer()
    for method in ("sum_offer", "sum_keys", SUM_METHOD):
        for client in EVERYONE:
            asked = server.ask(method, client)
            if client == 0:
                row = asked.reply
    numbers = {}
    for client in EVERYONE:
        survivors = _survivors_told(client, threshold)
        revealed = _revealed(server, client, survivors)
        if revealed.refused:
            return revealed
        if 0 in survivors:
            numbers[client] = revealed.reply.shares.table[0]
    return _opened(server, row, numbers)


def _survivors_told(client: int, threshold: int) -> tuple[int, ...]:
    """Return the survivors that a client is told of."""
    if client == 0:
        return EVERYONE[:threshold]
    if client < threshold:
        return EVERYONE[1:]
    return EVERYONE


def _revealed(server: LyingServer, client: int, survivors: Sequence[int]) -> Probed:
    """Return a client's shares, after its pads with the lost clients."""
    lost = [other for other in EVERYONE if other not in survivors]
    if lost:
        pads = server.lie("reveal_shares", client, method="reveal_pads", query=lost_query(*lost))
        if pads.refused:
            return pads
    return server.lie("reveal_shares", client, query=server.shares_query(client, survivors))


def _opened(
    server: LyingServer, row: Any, revealed: Mapping[int, torch.Tensor], root: bytes = b""
) -> Probed:
    """Return the seed of client 0, or why its shares do not give it.

    Args:
        server: that asked for its row.
        row: its reply, with covered shares for the others.
        revealed: what opens the shares of client 0, by their holders (32,).
        root: that client 0 was told; the honest one by default.
    """
    call = server.call(SUM_METHOD, 0)
    run = call.config.encode()
    root = root or as_bytes(server.call("sum_keys", 0).query.root.value)
    threshold = sum_client.sum_graph(run, EVERYONE, root, sum_graphs.Plan(MINIMUM)).threshold
    if len(revealed) < threshold:
        short = f"{len(revealed)} shares of the seed of client 0 were revealed, and it takes"
        return Probed(None, FrameError(f"{short} {threshold}"))
    shares = []
    for holder, opening in revealed.items():
        # client 0 reveals the share that it holds itself
        share = opening if holder == 0 else opening ^ row.boxes.table[holder - 1]
        shares.append(share.numpy().view("<u2"))
    coordinates = tuple(holder + 1 for holder in revealed)
    chosen = slice(threshold)
    (secret,) = shamir.recover(coordinates[chosen], np.stack(shares[chosen])[None])
    context = SumContext(run, SUM_METHOD, call.step, call.attempt, EVERYONE, threshold, root)
    seed = seed_of(secret, context)
    if commitment(seed, context) != as_bytes(row.commitment.values[0]):
        return Probed(None, FrameError("the shares do not give the seed of client 0"))
    return Probed(seed, None)


# --- frames ---


def other_configuration() -> Probed:
    """Send the frame of another run."""
    server = LyingServer().prepared("sum_keys")
    config = honest_plan(noise=False, rounds=1).calls[SUM_METHOD].config
    return server.lie(SUM_METHOD, 0, config=config)


def other_round() -> Probed:
    """Send a frame of a round that the run does not have."""
    server = LyingServer().prepared("sum_keys")
    return server.lie(SUM_METHOD, 0, round=server.plan.protocol.rounds + 2)


def misaddressed_frame() -> Probed:
    """Send a client the frame of another one."""
    server = LyingServer().prepared("sum_keys")
    return server.lie(SUM_METHOD, 0, to=(1,))


RULES: Mapping[str, Callable[[], Probed]] = {
    "keys are those that their clients signed": swapped_keys,
    "keys were signed for this run": keys_of_another_run,
    "a client's own key is its own": own_key,
    "no two clients have one key": duplicate_keys,
    "no two clients have one key, however it is encoded": encoded_twice,
    "no key has low order": low_order_key,
    "a key that was relayed stays": replaced_key,
    "a client's own key is in the root": root_without_the_client,
    "the path of its key leads to the root": wrong_path,
    "nothing is revealed of a sum of an earlier root": shares_after_another_root,
    "one attempt has one root": row_under_another_root,
    "clients of two roots open nothing of each other": two_roots,
    "a sum has two members or more": lone_member,
    "no row leaves in a plain sum": plain_sum,
    "no row of a sum leaves by itself": gathered_row,
    "one attempt masks one row": second_row,
    "one attempt has one list of members": second_members,
    "a replaced attempt stays replaced": older_attempt,
    "a call has one open sum": attempt_after_shares,
    "sums of a call do not differ by one client": differing_members,
    "sums are over whole cohorts": part_of_a_cohort,
    "no share after the pad of one client": pad_then_share,
    "no pad after the share of one client": share_then_pad,
    "shares are revealed for one list of survivors": second_survivors,
    "a lost client stays lost": returning_client,
    "enough clients survive": few_survivors,
    "a client's own row is in the sum": own_row_lost,
    "enough shares of noise are in the sum": few_noise_shares,
    "nothing is revealed of another attempt": other_attempt,
    "nothing is revealed of another call": other_call,
    "nothing is revealed of a sum over other members": other_members,
    "shares of one attempt open no other": shares_of_another_attempt,
    "two lists of survivors open no single row": isolated_by_lists,
    "frames are of the same run": other_configuration,
    "frames are of a round of the run": other_round,
    "frames are for their client": misaddressed_frame,
}


def conformance() -> list[Verdict]:
    """Return for each rule whether clients keep it, with what they say."""
    verdicts = []
    for rule, lie in RULES.items():
        probed = lie()
        sentence = "the server got what the rule prevents"
        if probed.refusal is not None:
            sentence = str(probed.refusal)
        verdicts.append(Verdict(rule, probed.refused, sentence))
    return verdicts


class BrokenRules(Scorer):
    """Share of rules that a lying server breaks.

    Rules are no sample of anything: they are one unit, and the score has no spread.
    """

    metric = "share of rules of secure sums that are broken"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each broken rule, (1, rules).

        Args:
            guess: True for each broken rule.
            truth: of the run, unused.
        """
        broken = [float(value) for value in guess.values.values()]
        return np.asarray(broken)[None]

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return zeros: what is broken at clients that answer nothing, (1, rules).

        Args:
            guess: True for each broken rule.
            truth: of the run, unused.
            draw: unused.
        """
        return np.zeros((1, len(guess.values)))


class SecureSumConformance(Attack):
    """Rules of secure sums, by a server that lies to clients."""

    name = "secure-sum-conformance"
    learns = "the update of a single client, by lying to those that form secure sums"
    harm = Harm.MESSAGES
    source = "Bonawitz et al. 2017, Practical Secure Aggregation; Bell et al. 2020"
    needs = "a server that lies to clients; the program of clients"
    scorer = BrokenRules()
    hidden_by = (SUMS,)
    of_mechanism = True

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not any(party.kind == "server" for party in view.parties):
            return "not applicable: the adversary is no server"
        aggregation = knowledge.config.get("aggregation", "plain")
        if aggregation == "plain" and not observed_updates(view, knowledge):
            return "not applicable: no updates of clients were observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return for each rule whether it is broken, with sentences in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.config.get("aggregation", "plain") == "plain":
            sentence = "sums are plain: the server reads every single row"
            verdicts = [Verdict(rule, False, sentence) for rule in RULES]
        else:
            verdicts = conformance()
        broken = {verdict.rule: not verdict.holds for verdict in verdicts}
        sentences = {verdict.rule: verdict.sentence for verdict in verdicts}
        return Guess("broken rules", broken, {"sentences": sentences})


def main() -> None:
    """Print each rule, whether it holds, and the client's sentence."""
    for verdict in conformance():
        result = "pass" if verdict.holds else "FAIL"
        print(f"{result}  {verdict.rule}: {verdict.sentence}")


if __name__ == "__main__":
    main()
