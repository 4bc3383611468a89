"""Low bits, repeated seeds and decryptions: at chance as runs release them, and not without."""

from __future__ import annotations

from typing import Any

import pytest
from attacked import FULL, digits, result_of

from securecluster import Federation
from securecluster.attacks.base import Attack
from securecluster.attacks.ckks_release import CkksRelease
from securecluster.attacks.low_bits import LowBits, naive_release
from securecluster.attacks.repeated_seed import RepeatedSeed, derived_release, seeded_release
from securecluster.core.lazy_torch import torch
from securecluster.protocols import CFL, FedAvg, OneShot, Settings

RESAMPLES = (200, 100)

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none"}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 4.0}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=4, samples=20)


@pytest.fixture(scope="module")
def runs(federation: Federation) -> dict[str, Any]:
    """Runs by what is added to their updates, one of secure sums, and one of encrypted pairs."""
    double = Settings(transcript="full", threads=1, dtype="float64")
    return {
        "float32": CFL(**SMALL, **NOISE).fit(federation, FULL),
        "float64": CFL(**SMALL, **NOISE).fit(federation, double),
        "none": CFL(**SMALL).fit(federation, FULL),
        "central": CFL(**SMALL, **NOISE, placement="central").fit(federation, FULL),
        "secagg": FedAvg(**SMALL, aggregation="secagg").fit(federation, FULL),
        "ckks": OneShot(**SMALL, relevance="ckks").fit(federation, FULL),
    }


@pytest.mark.always
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_last_bits_tell_candidates_apart_unless_noise_is_on_a_grid(
    dtype: str, runs: dict[str, Any], federation: Federation
) -> None:
    naive = result_of(LowBits(naive_release), runs[dtype], federation)
    assert naive.beats_chance and naive.value > 0.9
    ours = result_of(LowBits(), runs[dtype], federation)
    assert not ours.beats_chance
    assert abs(ours.value - 0.5) < 0.25


def test_differences_of_two_runs_on_one_seed_are_noise(
    runs: dict[str, Any], federation: Federation
) -> None:
    naive = result_of(RepeatedSeed(seeded_release), runs["float32"], federation)
    assert naive.beats_chance and naive.value > 0.999
    ours = result_of(RepeatedSeed(), runs["float32"], federation)
    assert not ours.beats_chance and abs(ours.value) < 0.05


def test_equal_rows_of_two_equal_runs_are_released_with_equal_bits() -> None:
    row = torch.linspace(-1, 1, 16)
    first = derived_release("run", row, 1.0, 1.0, 3)
    assert torch.equal(first, derived_release("run", row, 1.0, 1.0, 3))
    for run, number in (("other", 3), ("run", 4)):
        assert not torch.equal(first, derived_release(run, row, 1.0, 1.0, number))
    # a change of the last bit draws all noise anew
    changed = row.clone()
    changed[0] = torch.nextafter(changed[0], torch.tensor(1.0))
    assert not torch.equal(first[1:], derived_release("run", changed, 1.0, 1.0, 3)[1:])


@pytest.mark.parametrize("attack", [LowBits(), RepeatedSeed()], ids=lambda attack: attack.name)
def test_rows_without_noise_are_read_and_other_noise_is_not_clients(
    attack: Attack, runs: dict[str, Any], federation: Federation
) -> None:
    assert result_of(attack, runs["none"], federation).value > 0.999
    for name, reason in (("central", "clients add no noise"), ("secagg", "no single updates")):
        found = result_of(attack, runs[name], federation)
        assert found.startswith("not applicable: ") and reason in found


def test_decryptions_in_full_precision_give_the_key_and_released_ones_do_not(
    runs: dict[str, Any], federation: Federation
) -> None:
    full = result_of(CkksRelease(exact=False), runs["ckks"], federation)
    assert full.value == 1.0 and full.beats_chance
    released = result_of(CkksRelease(), runs["ckks"], federation)
    assert released.value < 0.01 and not released.beats_chance
    assert "no pairs are encrypted" in result_of(CkksRelease(), runs["none"], federation)
    assert "by the server alone" in result_of(
        CkksRelease(), runs["ckks"], federation, parties="wire"
    )
