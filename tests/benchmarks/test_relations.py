"""Literal worlds of every release: claims hold where a unit is blanked or replaced, half of the
noise is refuted, and adding or removing an example is more than a claim covers.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import NOISE, WAYS

from securecluster.app.registry import PROTOCOLS
from securecluster.benchmarks import relations
from securecluster.benchmarks.relations import BLANKED, MECHANISMS, REMOVED, REPLACED
from securecluster.errors import UsageError
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.runtime.endpoint import MINIMUM, message_types, releases_of

CONFIDENCE = 0.9999  # of each bound: there are some hundred
VARIANTS = [
    name
    for name in cases.VARIANTS
    if not {"trim", "sealed", "compress", "4bit", "momentum"}.intersection(name.split())
]
# By unit of privacy and by what a declaration says of a field: the mechanism that releases it.
# A protocol's own mechanism has the protocol's name before the field.
WORLD_OF = {
    ("example", "training"): ("training", "batches"),
    ("example", "loss"): ("losses",),
    ("example", "losses"): ("losses",),
    ("example", "model"): ("losses",),
    ("example", "rdpcfl model"): ("choices",),
    ("example", "vectors"): ("gram",),
    ("example", "cluster"): ("gram",),
    ("example", "signature"): ("sketch",),
    ("example", "coordinates"): ("coordinates",),
    ("example", "projections"): ("blocks",),
    ("client", "pipeline"): ("rows", "central", "shares"),
    ("client", "loss"): ("client losses",),
    ("client", "losses"): ("client losses",),
    ("client", "model"): ("client losses",),
    ("client", "rdpcfl model"): ("client choices",),
    ("client", "vectors"): ("client gram",),
    ("client", "cluster"): ("client gram",),
    ("client", "layer"): ("layer",),
    ("client", "nearest"): ("layer",),
    ("client", "signature"): ("client sketch",),
    ("client", "coordinates"): ("client sketch",),
    ("client", "projections"): ("client blocks",),
}


def declared(name: str, unit: str) -> dict[tuple[str, str], float]:
    """Return what a variant releases with noise, with the ratio of its sensitivities.

    Args:
        name: of the variant.
        unit: of privacy.
    """
    protocol = cases.variant(name, **{**NOISE, **WAYS[unit]})
    spec = protocol.privacy_spec(NOISE["noise"])
    found: dict[tuple[str, str], float] = {}
    for method, release in releases_of(protocol.client).items():
        if not release.private or release.derived or method in protocol.refused_methods:
            continue
        if release.trains and unit == "example":
            found["example", "training"] = 2.0
        _, reply = message_types(protocol.client, method)
        for field in fields(reply):
            noise = spec.fields.get(field.name)
            if noise is not None and math.isfinite(noise.multiplier):
                key = (unit, f"{protocol.name} {field.name}")
                key = key if key in WORLD_OF else (unit, field.name)
                found[key] = noise.replacement
            elif noise is None and field.name in release.through and unit == "client":
                found[unit, "pipeline"] = 2.0
    return found


def every_release() -> dict[tuple[str, str], float]:
    """Return what all protocols release with noise, in either unit."""
    found: dict[tuple[str, str], float] = {}
    for name in VARIANTS:
        for unit in ("client", "example"):
            try:
                released = declared(name, unit)
            except UsageError:  # one that protects whole clients alone
                continue
            for key, ratio in released.items():
                assert found.setdefault(key, ratio) == ratio, key
    return found


def test_every_release_of_every_protocol_has_a_world() -> None:
    protocols = {cases.VARIANTS[name][0].name for name in VARIANTS}
    assert protocols == set(PROTOCOLS), "a protocol without a variant has no worlds"
    released = every_release()
    assert set(released) == set(WORLD_OF)
    tested = set()
    for key, ratio in released.items():
        for name in WORLD_OF[key]:
            mechanism = MECHANISMS[name]
            assert (mechanism.unit, mechanism.replace) == (key[0], ratio), (key, name)
            tested.add(name)
    assert tested == set(MECHANISMS)


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
            noise = math.sqrt(n / SkellamMechanism(1.0, 1.0, MINIMUM).shares(n))
        assert found[BLANKED].mu == pytest.approx(1 / noise, abs=4 * found[BLANKED].error)
        assert 0.2 * mechanism.replace < found[REPLACED].mu
        if mechanism.event is None:
            claimed = gaussian_epsilon(mechanism.replace, relations.DELTA)
            assert found[REPLACED].claimed == pytest.approx(claimed, rel=1e-6)


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
