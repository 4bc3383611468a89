"""Conformance of secure sums: every rule holds, and without its guard the attack says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from attacked import FULL, digits, scene

from securecluster import Federation
from securecluster.attacks import secure_sum_conformance
from securecluster.attacks.scoring import Score, evaluate
from securecluster.attacks.secure_sum_conformance import RULES, SecureSumConformance, honest_plan
from securecluster.errors import SecureClusterError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.masking.pads import KeyPair
from securecluster.protections import key_exchange
from securecluster.protections.key_exchange import KeyExchange
from securecluster.protections.secure_sums import client as sum_client
from securecluster.protections.secure_sums import server as sum_server
from securecluster.protections.secure_sums.client import SecureSumService
from securecluster.protections.secure_sums.double_mask import SumContext, UnmaskingGuard
from securecluster.protections.secure_sums.graph import complete_graph
from securecluster.protections.sum_ranges import SumRanges
from securecluster.protocols import CFL, FedAvg
from securecluster.runtime import endpoint
from securecluster.runtime.endpoint import Endpoint

Removal = Callable[[pytest.MonkeyPatch], None]


def nothing(*args: Any, **named: Any) -> None:
    """What a guard does that was removed."""


def without(owner: Any, *names: str) -> Removal:
    """Remove checks that raise or return nothing."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        for name in names:
            patch.setattr(owner, name, nothing)

    return remove


def forgetful(**forgotten: Any) -> Removal:
    """Let guards forget what they recorded of an attempt."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        recorded = UnmaskingGuard._record

        def record(self: UnmaskingGuard, context: Any) -> Any:
            return dataclasses.replace(recorded(self, context), **forgotten)

        patch.setattr(UnmaskingGuard, "_record", record)

    return remove


def without_records(patch: pytest.MonkeyPatch) -> None:
    """Let guards take any attempt for the one that they recorded last."""

    def record(self: UnmaskingGuard, context: Any) -> Any:
        (last,) = self.state.attempts.values()
        return last[max(last)]

    patch.setattr(UnmaskingGuard, "_record", record)
    patch.setattr(UnmaskingGuard, "_store", nothing)


def without_low_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyPair, "exchange", lambda self, peer_public: bytes(32))


def any_encoding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pads, "point", lambda public: int.from_bytes(public, "little"))


def unbound_signatures(patch: pytest.MonkeyPatch) -> None:
    """Let signatures of keys hold for every run."""

    def statement(self: KeyExchange, client: int, public: bytes) -> bytes:
        return pads.transcript("any run", client, public)

    patch.setattr(KeyExchange, "_statement", statement)


def forgotten_keys(patch: pytest.MonkeyPatch) -> None:
    answered = KeyExchange.answer

    def answer(self: KeyExchange, call: Any) -> Any:
        self._keys.secrets.pairwise.public.clear()
        return answered(self, call)

    patch.setattr(KeyExchange, "answer", answer)


def no_minimum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Endpoint, "_refuse_small_sums", nothing)
    patch.setattr(SecureSumService, "check", nothing)
    patch.setattr(UnmaskingGuard, "_check_members", nothing)
    patch.setattr(UnmaskingGuard, "_check_threshold", nothing)

    def graph(run: bytes, members: Any, public: Any, minimum: int) -> Any:
        return complete_graph(members, 1)

    patch.setattr(sum_client, "sum_graph", graph)


def open_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SecureSumService, "check", nothing)
    patch.setattr(SecureSumService, "hidden", lambda self, call, reply, *declared: reply)


def low_threshold(patch: pytest.MonkeyPatch) -> None:
    """Let seeds take three of five shares, as against an honest-but-curious server."""

    def graph(run: bytes, members: Any, public: Any, minimum: int) -> Any:
        return complete_graph(members, 3)

    patch.setattr(sum_client, "sum_graph", graph)
    patch.setattr(sum_server, "sum_graph", graph)
    patch.setattr(UnmaskingGuard, "_check_threshold", nothing)


def misdelivered(patch: pytest.MonkeyPatch) -> None:
    """Let client 0 answer for client 1."""

    def accept(self: Endpoint[Any], call: Any) -> None:
        self._position_of.setdefault(1, 0)

    patch.setattr(Endpoint, "_refuse_strangers", accept)
    patch.setattr(KeyExchange, "root", lambda self, client: b"that of client 0")
    patch.setattr(KeyExchange, "check_neighbours", nothing)
    patch.setattr(KeyExchange, "pair_key", lambda self, client, peer: bytes(32))


def few_shares(patch: pytest.MonkeyPatch) -> None:
    """Let sums be as small as without noise; the threshold would refuse for its own reason."""
    patch.setattr(SumRanges, "least_members", lambda self, minimum, members: minimum)
    patch.setattr(SecureSumService, "least_members", lambda self, members: 2)
    low_threshold(patch)


def unbound_secrets(patch: pytest.MonkeyPatch) -> None:
    """Let all that is derived follow from the run alone, and not from the attempt."""
    patch.setattr(SumContext, "hash", b"the same in every attempt")


def any_root(patch: pytest.MonkeyPatch) -> None:
    """Let each path lead to each root."""

    class Any(bytes):
        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(key_exchange, "root_of", lambda *arguments: Any())


def unbound_roots(patch: pytest.MonkeyPatch) -> None:
    """Let what is derived for an attempt follow from all but the root."""
    of_all = SumContext.hash.func
    without_root = property(lambda self: of_all(dataclasses.replace(self, root=b"")))
    patch.setattr(SumContext, "hash", without_root)


def both(*removals: Removal) -> Removal:
    def remove(patch: pytest.MonkeyPatch) -> None:
        for removal in removals:
            removal(patch)

    return remove


unchecked_survivors = without(UnmaskingGuard, "_check_survivors")
unchecked_attempts = without(UnmaskingGuard, "_check_earlier_attempts")
GUARDS: dict[str, Removal] = {
    "keys are those that their clients signed": without(KeyRing, "verify"),
    "keys were signed for this run": unbound_signatures,
    "a client's own key is its own": without(key_exchange, "check_public_keys"),
    "no two clients have one key": without(key_exchange, "check_public_keys"),
    "no two clients have one key, however it is encoded": any_encoding,
    "no key has low order": without_low_order,
    "a key that was relayed stays": forgotten_keys,
    "a client's own key is in the root": any_root,
    "the path of its key leads to the root": any_root,
    "nothing is revealed of a sum of an earlier root": unbound_roots,
    "one attempt has one root": unbound_roots,
    "clients of two roots open nothing of each other": unbound_roots,
    "a sum has two members or more": no_minimum,
    "no row leaves in a plain sum": open_sums,
    "no row of a sum leaves by itself": without(endpoint, "_refuse_other_verbs"),
    "one attempt masks one row": without(UnmaskingGuard, "take_part"),
    "one attempt has one list of members": without(UnmaskingGuard, "take_part"),
    "a replaced attempt stays replaced": unchecked_attempts,
    "a call has one open sum": unchecked_attempts,
    "sums of a call do not differ by one client": unchecked_attempts,
    "sums are over whole cohorts": without(sum_client, "check_cohorts"),
    "no share after the pad of one client": forgetful(lost=()),
    "no pad after the share of one client": forgetful(survivors=None),
    "shares are revealed for one list of survivors": forgetful(survivors=None),
    "a lost client stays lost": forgetful(lost=()),
    "enough clients survive": unchecked_survivors,
    "a client's own row is in the sum": unchecked_survivors,
    "enough shares of noise are in the sum": few_shares,
    "nothing is revealed of another attempt": without_records,
    "nothing is revealed of another call": without_records,
    "nothing is revealed of a sum over other members": without_records,
    "shares of one attempt open no other": unbound_secrets,
    "two lists of survivors open no single row": low_threshold,
    "frames are of the same run": without(Endpoint, "_refuse_other_configuration"),
    "frames are of a round of the run": without(Endpoint, "_check_counts"),
    "frames are for their client": misdelivered,
}
# rules whose guards also shape the honest frames that the lie starts from
REPLANNED = {"keys were signed for this run", "two lists of survivors open no single row"}
SAID = {
    "keys are those that their clients signed": "did not sign",
    "a client's own key is its own": "in its own name",
    "no two clients have one key, however it is encoded": "the same public key",
    "a key that was relayed stays": "another key of client 1 than before",
    "a client's own key is in the root": "its own key is not in",
    "the path of its key leads to the root": "its own key is not in",
    "nothing is revealed of a sum of an earlier root": "with these members and keys",
    "one attempt has one root": "masked a row in this attempt already",
    "clients of two roots open nothing of each other": "do not give the seed of client 0",
    "a sum has two members or more": "clients ask for 2 or more",
    "no row leaves in a plain sum": "sums are secure",
    "no row of a sum leaves by itself": "through sum, not gather",
    "one attempt masks one row": "masked a row in this attempt already",
    "a replaced attempt stays replaced": "took part in attempt 1 already",
    "no share after the pad of one client": "revealed its pair key",
    "shares are revealed for one list of survivors": "another list of survivors",
    "a lost client stays lost": "cannot come back",
    "enough shares of noise are in the sum": "and 4 and a majority must",
    "nothing is revealed of another call": "did not take part",
    "shares of one attempt open no other": "do not give the seed of client 0",
    "two lists of survivors open no single row": "and it takes 4",
    "frames are of the same run": "another configuration",
    "frames are of a round of the run": "the round of a frame",
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=4, samples=20)


def guess_of(made: Any, federation: Federation, party: Any = "server") -> Any:
    attack = SecureSumConformance()
    view, knowledge, truth = scene(made.fit(federation, FULL), federation, parties=party)
    if attack.applies(view, knowledge):
        return attack.applies(view, knowledge)
    return attack.run(view, knowledge), evaluate(attack, view, knowledge, truth)


def test_every_rule_has_a_guard_that_can_be_removed() -> None:
    assert set(GUARDS) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds_and_says_why(rule: str) -> None:
    probed = RULES[rule]()
    assert isinstance(probed.refusal, SecureClusterError)
    assert SAID.get(rule, "") in str(probed.refusal)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_without_its_guard_is_reported_as_broken(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    RULES[rule]()  # the honest run that it starts from has all guards
    GUARDS[rule](monkeypatch)
    if rule in REPLANNED:
        monkeypatch.setattr(secure_sum_conformance, "honest_plan", honest_plan.__wrapped__)
    assert not RULES[rule]().refused


@pytest.mark.exhaustive
def test_the_score_is_the_share_of_broken_rules(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none"}
    secure = FedAvg(**small, aggregation="secagg")
    guess, score = guess_of(secure, federation)
    assert isinstance(score, Score)
    assert score.value == score.chance == 0 and not score.beats_chance
    assert set(guess.details["sentences"]) == set(RULES)
    monkeypatch.setattr(UnmaskingGuard, "_check_survivors", nothing)
    guess, score = guess_of(secure, federation)
    assert 0 < score.value < 0.2 and score.beats_chance
    assert guess.values["enough clients survive"]
    guess, score = guess_of(FedAvg(**small), federation)
    assert score.value == 1 and score.beats_chance
    assert "the server reads every single row" in str(guess.details)


def test_others_than_servers_and_other_sums_are_not_applicable(federation: Federation) -> None:
    small: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear"}
    assert "is no server" in guess_of(CFL(**small), federation, "wire")
