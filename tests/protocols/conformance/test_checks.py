"""Every check runs to its end, and all protocols of this project pass."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from cases import Protocol
from fesem import FeSEM
from flexcfl import FlexCFL
from mistaken import FixedNoise, Global, Loud, Unmasked, UnusedNoise

from securecluster.errors import UsageError
from securecluster.messaging.receipts import GAUSSIAN, Receipt
from securecluster.protocols import IFCA, CLoVE, FedAvg, FineTune, Local, conformance
from securecluster.protocols.conformance import CHECKS, ConformanceError, check
from securecluster.runtime.call_context import Releases

# the cheapest one first, which runs by default
OWN = [FineTune, *(p for p in cases.EVERY_PROTOCOL if p not in (CLoVE, IFCA, FineTune))]


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("protocol", OWN)
def test_a_protocol_of_this_project_passes_every_check(protocol: Protocol) -> None:
    digits = (conformance.small_clients(), conformance.small_clients(1, 6))
    report = check(protocol, *digits, **{"model": "linear", **cases.SMALL[protocol]})
    assert report.passed, report
    assert [result.name for result in report.results] == list(CHECKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("protocol", [IFCA, CLoVE])
def test_methods_with_several_models_pass_every_check(protocol: Protocol) -> None:
    report = check(protocol, **cases.SMALL[protocol])
    assert report.passed, report
    assert report["dropouts"].outcome == report["worlds-client"].outcome == "passed"


def test_a_failure_ends_no_other_check() -> None:
    seen: list[str] = []
    report = check(Loud, report=lambda result: seen.append(result.name))
    assert seen == list(CHECKS)
    assert not report.passed
    assert {result.outcome for result in report.failures} == {"failed"}
    # over real frames the text of an error stays at its client
    near = [result for result in report.failures if result.name != "nodes"]
    assert all("ValueError: odd sample" in result.sentence for result in near)
    assert all("mistaken.py:" in result.sentence for result in near)
    assert "odd sample" not in report["nodes"].sentence
    assert report.closing.startswith("Loud: 0 of 18 checks passed")


def test_only_the_checks_that_are_named_are_run() -> None:
    report = check(Unmasked, only=["unit-client", "bytes"])
    assert [(r.name, r.outcome) for r in report.results] == [
        ("bytes", "passed"),
        ("unit-client", "failed"),
    ]
    sentence = r"✗ unit-client: .* would leave client 0 without noise"
    with pytest.raises(ConformanceError, match=sentence):
        report.require()
    assert report.as_json()["passed"] is False
    with pytest.raises(KeyError):
        report["masks"]
    with pytest.raises(UsageError, match="unknown check 'byte': did you mean 'bytes'"):
        check(FedAvg, only=["byte"])


def test_a_refusal_of_the_protocol_is_no_failure() -> None:
    result = check(CLoVE, only=["secure-sums"])["secure-sums"]
    assert result.outcome == "not applicable"
    assert "take IFCA" in result.sentence
    free = check(Local, only=["unit-client"])["unit-client"]
    assert (free.outcome, free.sentence) == (
        "not applicable",
        "no client releases anything of its data",
    )


def test_a_function_makes_protocols_too() -> None:
    def make(**params: Any) -> Any:
        return FlexCFL(**{"model": "linear", "epochs": 1, "k": 2, **params})

    report = check(make, only=["bytes", "new-process"])
    assert report.protocol == "FlexCFL"
    assert report.passed, report


def test_a_class_that_cannot_be_imported_is_not_replayed_elsewhere() -> None:
    class Inner(FeSEM):
        """Defined in a function."""

    result = check(Inner, only=["new-process"])["new-process"]
    assert result.outcome == "not applicable"
    assert "define it at the top of a module" in result.sentence


def test_a_server_that_reads_clients_replays_here_and_not_in_a_new_process() -> None:
    report = check(Global, only=["replay", "new-process"])
    assert report["replay"].outcome == "passed"
    assert report["new-process"].outcome == "failed"


def test_a_mask_under_which_clusters_differ_is_declared() -> None:
    class Undeclared(cases.RDPCFL):
        """R-DPCFL, which standardises coordinates, without the declaration."""

        other_clusters_under = ()

    masks = ("none", "rotation")
    declared = check(cases.RDPCFL, masks=masks, only=["newcomers", "masks"])
    assert {result.outcome for result in declared.results} == {"not applicable"}
    undeclared = check(Undeclared, masks=masks, only=["newcomers", "masks"])
    assert not undeclared.passed


def test_small_clients_are_alike_in_number_of_samples() -> None:
    assert {len(shard.y) for shard in conformance.small_clients().shards} == {40}


@pytest.mark.parametrize("kind", [FixedNoise, UnusedNoise])
def test_neighbouring_worlds_find_a_field_whose_receipt_is_a_lie(
    kind: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = (Receipt(GAUSSIAN, ("update",), 1e9),)
    monkeypatch.setattr(Releases, "receipts", lambda *given: [lie] * len(given[-1]))
    result = check(kind, only=["worlds-client"])["worlds-client"]
    assert result.outcome == "failed"
    assert "update still depends on data where public numbers are in place" in result.sentence
