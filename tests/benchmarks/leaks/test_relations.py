"""Literal worlds of every release: claims hold where a unit is blanked or replaced, half of the
noise is refuted, and adding or removing an example is more than a claim covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import NOISE, WAYS

from benchmarks.leaks import relations
from benchmarks.leaks.relations import BLANKED, MECHANISMS, REMOVED, REPLACED
from securecluster.errors import UsageError
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.protections.secure_sums.graph import Plan
from securecluster.protocols.common.options.option_group import refused_methods
from securecluster.protocols.registry import PROTOCOLS
from securecluster.runtime.endpoint import MINIMUM, releases_of

# of which a secure sum is unmasked, by its members
SURVIVORS = Plan(MINIMUM).least_survivors

CONFIDENCE = 0.9999  # of each bound: there are some hundred
VARIANTS = [
    name
    for name in cases.VARIANTS
    if not {"trim", "sealed", "compress", "4bit", "momentum"}.intersection(name.split())
]
# By unit of privacy and by the field that receipts name: the mechanism that releases it.
# A protocol's own mechanism has the protocol's name before the field.
WORLD_OF = {
    ("example", "training"): ("training", "batches"),
    ("example", "loss"): ("losses",),
    ("example", "losses"): ("losses",),
    ("example", "model"): ("losses",),
    ("example", "rdpcfl model"): ("choices",),
    ("example", "moments"): ("descriptor",),
    ("example", "vectors"): ("gram",),
    ("example", "cluster"): ("gram",),
    ("example", "signature"): ("sketch",),
    ("example", "coordinates"): ("coordinates", "residual coordinates"),
    ("example", "residuals"): ("residuals",),
    ("example", "projections"): ("blocks",),
    ("example", "mean"): ("mean number",),
    ("client", "pipeline"): ("rows", "central", "shares"),
    ("client", "loss"): ("client losses",),
    ("client", "losses"): ("client losses",),
    ("client", "model"): ("client losses",),
    ("client", "rdpcfl model"): ("client choices",),
    ("client", "moments"): ("client descriptor",),
    ("client", "vectors"): ("client gram",),
    ("client", "cluster"): ("client gram",),
    ("client", "layer"): ("layer",),
    ("client", "nearest"): ("layer",),
    ("client", "signature"): ("client sketch",),
    ("client", "projections"): ("client blocks",),
    ("client", "mean"): ("client mean number",),
}


# of which a run with noise has none: methods that are refused there
WITHOUT_NOISE = {
    "HiddenChoiceClient.count_choice", "HiddenChoiceClient.contribute_blocks",
    "LabelMaps.count_map", "HiddenClient.count_parts", "HiddenClient.send_counted_parts",
    "HiddenClient.count_cell", "HiddenClient.count_step", "HiddenClient.send_counted_step",
    "HiddenClient.count_cluster", "HiddenClient.count_block", "HiddenClient.contribute_counted",
}  # fmt: skip
# called where clients share a scale; tests/protocols/prices/test_shared_scale.py has its worlds
OF_A_SCALE = {"TrainingClient.sum_columns"}
TEN = cases.two_clusters(10, 24)
RUN, NEWCOMERS = TEN.select(range(8)), TEN.select(range(8, 10))


def runs() -> Iterator[tuple[Any, str]]:
    """Yield protocols with noise, which together call every method, each with its unit."""
    for unit in ("client", "example"):
        noisy = {**NOISE, **WAYS[unit], "model": "linear", "epochs": 1, "rounds": 3}
        for name in VARIANTS:
            yield cases.variant(name, **noisy), unit
        yield cases.variant("srfca", **noisy, trim=0.2), unit
        yield cases.variant("ifca", **noisy, rebalance=2), unit


def released(fitted: Any, unit: str) -> dict[tuple[str, str], float]:
    """Return what a run's clients and newcomers released with noise, by their receipts.

    Args:
        fitted: which has predicted newcomers' clusters.
        unit: of privacy.

    Returns:
        The ratio of sensitivities by unit and field.
    """
    pipeline = fitted.pipeline(fitted.kept_.learned.config)
    policies = releases_of(fitted.client)
    found: dict[tuple[str, str], float] = {}
    for event in fitted.ledger_.events:
        if event.mechanism == "dp-sgd":
            key = (unit, "training")
        elif event.mechanism == "gaussian":
            (field,) = event.fields
            key = (unit, f"{fitted.name} {field}")
            key = key if key in WORLD_OF else (unit, field)
            if field in policies[event.method].through and pipeline.of(field).multiplier:
                key = (unit, "pipeline")
        else:
            assert event.mechanism in ("exact", "free", "public")
            continue
        assert found.setdefault(key, event.replace) == event.replace, key
    return found


def fitted_runs() -> Iterator[tuple[Any, str]]:
    """Yield fitted protocols, which have predicted newcomers' clusters, each with its unit."""
    for made, unit in runs():
        try:
            fitted = made.fit(RUN)
        except UsageError:  # one that protects whole clients alone
            assert unit == "example"
            continue
        fitted.join(NEWCOMERS)
        yield fitted, unit
    # data of which nobody knows the centre
    for unit in ("client", "example"):
        made = cases.variant("signature noise", **NOISE, **WAYS[unit], model="linear", rounds=2)
        fitted = made.fit(replace(RUN, data="own"))
        fitted.join(replace(NEWCOMERS, data="own"))
        yield fitted, unit


def methods(fitted: Any) -> tuple[set[str], set[str]]:
    """Return the private methods of a protocol's clients, and those that its run called."""
    called = {event.method for event in fitted.ledger_.events}
    private, answered = set(), set()
    for name, policy in releases_of(fitted.client).items():
        if policy.private and not policy.derived and name not in refused_methods(fitted):
            # a method of several protocols needs one run
            method = getattr(fitted.client, name).__qualname__
            private.add(method)
            if name in called:
                answered.add(method)
    return private, answered


def test_every_release_of_every_protocol_has_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    protocols = {cases.VARIANTS[name][0].name for name in VARIANTS}
    assert protocols == set(PROTOCOLS), "a protocol without a variant has no worlds"
    cases.stub_pair_network(monkeypatch)
    found: dict[tuple[str, str], float] = {}
    every, answered = set[str](), set[str]()
    for fitted, unit in fitted_runs():
        for key, ratio in released(fitted, unit).items():
            assert found.setdefault(key, ratio) == ratio, key
        private, called = methods(fitted)
        every |= private
        answered |= called
    assert every - answered == WITHOUT_NOISE | OF_A_SCALE, "no run shows what these methods release"
    assert set(found) == set(WORLD_OF)
    tested = set()
    for key, ratio in found.items():
        for name in WORLD_OF[key]:
            mechanism = MECHANISMS[name]
            assert (mechanism.unit, mechanism.replace) == (key[0], ratio), (key, name)
            tested.add(name)
    assert tested == set(MECHANISMS)


@pytest.mark.always
@pytest.mark.few(4)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(
    ("n", "draws"), [(4, 200), cases.exhaustive(2, 4000), cases.exhaustive(10, 4000)]
)
def test_claims_hold_where_a_unit_is_blanked_or_replaced(name: str, n: int, draws: int) -> None:
    mechanism = MECHANISMS[name]
    found = mechanism.audits(n, 1.0, draws, CONFIDENCE, (BLANKED, REPLACED))
    assert not found[BLANKED].refuted and not found[REPLACED].refuted
    if mechanism.gaussian:
        # the canary moves what is released by its whole sensitivity: nothing is easier to tell
        noise = 1.0
        if name == "shares":  # those of survivors beyond the planned ones are more noise
            noise = math.sqrt(n / SkellamMechanism(1.0, 1.0, SURVIVORS).shares(n))
        assert found[BLANKED].mu == pytest.approx(1 / noise, abs=4 * found[BLANKED].error)
        assert 0.2 * mechanism.replace < found[REPLACED].mu
        if mechanism.event is None:
            claimed = gaussian_epsilon(mechanism.replace, relations.DELTA)
            assert found[REPLACED].claimed == pytest.approx(claimed, rel=1e-6)


@pytest.mark.always
@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name, one in MECHANISMS.items() if one.gaussian])
def test_half_of_the_noise_is_refuted(name: str) -> None:
    (found,) = MECHANISMS[name].audits(4, 1.0, 160, 0.99, (BLANKED,), noise=0.5).values()
    assert found.refuted, "or else a claim that holds would mean nothing"


@pytest.mark.parametrize("name", ["training", "sketch", "blocks", "losses"])
def test_adding_or_removing_one_of_two_examples_shows_more_than_is_claimed(name: str) -> None:
    """What is divided by n shows n: the claim is for a blanked example, with n public."""
    (found,) = MECHANISMS[name].audits(2, 4.0, 400, 0.99, (REMOVED,)).values()
    assert found.claimed == pytest.approx(0.9263, abs=1e-4)
    assert found.least > found.claimed


def test_a_gram_matrix_without_a_divisor_covers_removal_as_well() -> None:
    (found,) = MECHANISMS["gram"].audits(2, 1.0, 240, CONFIDENCE, (REMOVED,)).values()
    assert not found.refuted
    assert found.mu == pytest.approx(1.0, abs=4 * found.error)


def test_the_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = relations.main(["--draws", "60", "--only", "losses"])
    _, header, *rows = path.read_text().splitlines()
    assert header.startswith("mechanism,unit,n,claimed_blanked,blanked,blanked_refuted")
    assert [line.split(",")[2] for line in rows] == ["2", "5", "10", "30"]
    content: dict[str, Any] = dict(zip(header.split(","), rows[0].split(","), strict=True))
    assert content["blanked_refuted"] == content["replaced_refuted"] == "0"
