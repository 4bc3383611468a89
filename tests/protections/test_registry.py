"""Registered protections are complete, and a new one touches its own files and the registry."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import two_clusters
from combinations import COVERING, NAMES, values_of
from own_claims import CLAIMS

from benchmarks.golden import OTHER_PROTECTIONS
from securecluster import Federation
from securecluster.attacks.registry import ATTACKS, attack_named
from securecluster.cli.compatibility import OPTIONS
from securecluster.errors import UsageError
from securecluster.messaging.messages import Call, Rows
from securecluster.messaging.transcript import NAMING_METHODS
from securecluster.privacy.cohorts import Cohort
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.protections import registry
from securecluster.protections.completeness import lacks
from securecluster.protections.plain import PlainSumProtection
from securecluster.protections.protection import (
    HIDDEN_SUMS,
    PairProtection,
    ServerKeys,
    SumFacts,
    SumProtection,
)
from securecluster.protections.registry import AGGREGATIONS, RELEVANCES, register, service_methods
from securecluster.protocols import FedAvg, Settings
from securecluster.protocols.conformance import check_frames
from securecluster.runtime.aggregators import Exchange, Plain, Total
from securecluster.runtime.client_half import ClientHalf
from securecluster.runtime.port import Connected
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.statements import privacy_section

ALL: list[SumProtection | PairProtection] = [*AGGREGATIONS.values(), *RELEVANCES.values()]
HIDING = [protection for protection in ALL if protection.hides]
IDS = [f"{'sums' if isinstance(p, SumProtection) else 'pairs'}-{p.name}" for p in HIDING]


def option_of(protection: SumProtection | PairProtection) -> str:
    return "aggregation" if isinstance(protection, SumProtection) else "relevance"


def lacks_in_tests(protection: SumProtection | PairProtection) -> list[str]:
    """What the tests of this project lack for a protection."""
    option, missing = option_of(protection), []
    if protection.name not in OPTIONS[option]:
        missing.append("the table of what works with what has no column of it")
    ways = [way for way in OTHER_PROTECTIONS.values() if way.get(option) == protection.name]
    if not ways:
        missing.append("no case of the golden benchmark: add one to OTHER_PROTECTIONS")
    covered = {feature for cell in COVERING for feature in values_of(cell)}
    if (option, protection.name) not in covered:
        missing.append("no run under faults: add a cell to COVERING")
    if not any(set(attack_named(name).hidden_by) & protection.claims for name in ATTACKS):
        missing.append("no attack tries what it claims")
    source = inspect.getfile(type(protection))
    if not any(source.endswith(claim.source) for claim in CLAIMS):
        missing.append("no claim of its sentences is checked: add one to own_claims")
    if not protection.methods.keys() <= NAMING_METHODS:
        missing.append("its messages name clients, and NAMING_METHODS does not know them")
    return missing


@pytest.mark.parametrize("protection", ALL, ids=lambda p: f"{option_of(p)}-{p.name}")
def test_no_protection_lacks_anything(protection: SumProtection | PairProtection) -> None:
    assert lacks(protection) == []


@pytest.mark.parametrize("protection", HIDING, ids=IDS)
def test_every_protection_is_tried_by_tests(protection: SumProtection | PairProtection) -> None:
    assert lacks_in_tests(protection) == []


def test_names_are_what_the_options_take_and_help_describes_them() -> None:
    assert list(AGGREGATIONS) == [protection.name for protection in AGGREGATIONS.values()]
    assert list(RELEVANCES) == [protection.name for protection in RELEVANCES.values()]
    assert NAMES[1:3] == ["aggregation", "relevance"]
    about = AGGREGATIONS.described()
    assert about.startswith(
        "plain (the server reads every reply and adds them) or secagg (clients "
    )
    assert ", pads (it reads R_ij only) or ckks (" in RELEVANCES.described()


def test_messages_of_all_services_are_known_as_ones_that_name_clients() -> None:
    assert set(service_methods()) <= NAMING_METHODS


class Nothing(PairProtection):
    """A protection of which nothing is written."""

    name = "Not a name"
    about = ""
    by_authority = True


def test_what_a_protection_lacks_is_said() -> None:
    found = lacks(Nothing())
    assert [sentence.split(":")[0] for sentence in found] == [
        "name", "about", "read", "unseen", "replies", "client_half", "server_half", "authority",
        "authority_view", "claims",
    ]  # fmt: skip
    assert len(lacks_in_tests(Nothing())) == 5


@dataclasses.dataclass(frozen=True, eq=False)
class Anything:
    """A message whose field may hold anything."""

    rows: Rows


class Careless(SumProtection):
    """A protection with messages that are not bounded, and replies that it does not hide."""

    name = "careless"
    about = "hides nothing"
    claims = frozenset({HIDDEN_SUMS})
    methods: Mapping[str, Any] = {"tell": (Anything, Anything)}

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden

    def replies(self) -> Any:
        return SimpleNamespace(methods={}, reply_class=lambda reply, release: self.hidden or reply)


def test_messages_that_hold_anything_and_replies_that_are_not_hidden_are_said() -> None:
    found = [sentence for sentence in lacks(Careless(None)) if "careless" not in sentence]
    assert found[-4:] == [
        "methods: Anything.rows of tell may hold anything",
        "methods: Anything.rows of tell may hold anything",
        "replies: a hidden reply has the class of one that is not",
        "replies: its messages lack those of ['tell'], which clients answer",
    ]
    assert "replies: Anything.rows may hold anything" in lacks(Careless(Anything))


# a toy: clients halve their numbers, and the server doubles the sum


@cache
def halved_class(reply: Any) -> Any:
    made = dataclasses.make_dataclass(
        f"Halved{reply.__name__}", [], bases=(reply,), frozen=True, eq=False
    )
    made.__module__ = reply.__module__  # its annotations are those of the reply
    return made


def scaled(reply: Any, factor: float, kind: Any) -> Any:
    values = {
        name: Rows(factor * value.values) if isinstance(value, Rows) else value
        for name, value in vars(reply).items()
    }
    return kind(**values)


class HalvedReplies:
    methods: Mapping[str, Any] = {}

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        return halved_class(reply)


class HalvingClients(ClientHalf):
    methods: Mapping[str, Any] = {}

    def answer(self, call: Call) -> Any:
        raise NotImplementedError

    def check(self, call: Call, release: ReleasePolicy) -> None:
        assert release.via == ("sum",)

    def hidden(self, call: Call, reply: Any, expected: type, release: ReleasePolicy) -> Any:
        return scaled(reply, 0.5, halved_class(expected))


class HalvedSums(Connected):
    name = "halved"
    server_reads_replies = False
    hides_replies = True

    def run(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        groups: int,
        cohorts: Sequence[Cohort] = (),
    ) -> Total:
        total = Plain().run(exchange, call, by, groups)
        kind = type(total.rows).__bases__[0]
        return Total(scaled(total.rows, 2.0, kind), total.counts, total.ids)


class Halving(SumProtection):
    name = HalvedSums.name
    about = "clients halve their numbers, which hides nothing"
    claims = frozenset({HIDDEN_SUMS})

    def replies(self) -> HalvedReplies:
        return HalvedReplies()

    def client_half(self, facts: SumFacts, keys: KeyRing) -> HalvingClients:
        return HalvingClients()

    def server_half(self, facts: SumFacts, keys: ServerKeys) -> HalvedSums:
        return HalvedSums()

    def read(self, reply: str, released: str) -> str:
        return f"sums of {reply}: which clients halved"

    def unseen(self, field: str, released: str) -> str:
        return f"the whole of {field}"


@pytest.fixture
def halving() -> Iterator[SumProtection]:
    protection = Halving()
    register(protection)
    yield protection
    del AGGREGATIONS[protection.name]


def test_a_protection_of_a_file_alone_runs_fedavg_and_is_in_its_report(
    halving: SumProtection,
) -> None:
    assert lacks(halving) == []
    federation: Federation = two_clusters(6, 20)
    options: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear", "mask": "none"}
    full = Settings(transcript="full", dtype="float64")
    plain = FedAvg(**options).fit(federation, full)
    fitted = FedAvg(**options, aggregation="halved").fit(federation, full)
    check_frames(fitted)
    torch.testing.assert_close(
        fitted.client_models_.values, plain.client_models_.values, rtol=1e-12, atol=1e-12
    )
    replies = [
        message.content.delta.values[0]
        for message in fitted.transcript_.seen_by("server")
        if message.method == "contribute" and message.receiver.kind == "server"
    ]
    assert replies and fitted.ledger_.events
    told = privacy_section.section(fitted.result_)
    assert any("which clients halved" in sentence for sentence in told["server_view"])
    assert any("the whole of delta" in sentence for sentence in told["unseen"])


def test_a_name_is_taken_once_and_unknown_ones_are_refused(halving: SumProtection) -> None:
    with pytest.raises(UsageError, match="there is a protection 'halved' already"):
        register(Halving())
    with pytest.raises(UsageError, match="choose one of halved, plain, secagg"):
        FedAvg(aggregation="added").check(6)
    with pytest.raises(UsageError, match="take aggregation secagg, or placement local"):
        FedAvg(
            aggregation="halved", clip=1.0, noise=1.0, dp_unit="client", placement="distributed"
        ).check(6)
    assert not PlainSumProtection().hides


class Shown(PairProtection):
    """Rows of pairs that the server reads, under another name."""

    name = "shown"


def test_a_protection_of_pairs_is_one_of_relevance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("securecluster.protections.registry.RELEVANCES", dict(RELEVANCES))
    protection = Shown()
    register(protection)
    assert registry.RELEVANCES["shown"] is protection
    assert "shown" not in registry.AGGREGATIONS


@pytest.mark.parametrize("name", ["bfv", "ckks"])
def test_sums_that_earlier_versions_had_are_refused_with_what_to_take(name: str) -> None:
    with pytest.raises(UsageError, match=f"aggregation {name} has left securecluster: take secagg"):
        FedAvg(aggregation=name).check(6)
