"""Audits by canary samples: bounds are not above the ledger's ε, and halved noise is refuted.

They go through the protocols' own endpoints and frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attacked import digits, result_of, score_of
from noise_audits import FULL, SMALL, halved_noise

from securecluster import Federation
from securecluster.attacks import dp_audit, release_audits
from securecluster.attacks.dp_audit import Planted
from securecluster.attacks.registry import attack_named
from securecluster.attacks.release_audits import (
    EigenvectorAudit,
    GramAudit,
    LossAudit,
    SignatureAudit,
    TrainingAudit,
    planted_eigenvectors,
    planted_losses,
    planted_rows,
    planted_samples,
    planted_signatures,
)
from securecluster.errors import UsageError
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import CFL, FLHC, SRFCA, FedAvg, OneShot, Signature

RESAMPLES = (5, 10)

# the less noise, the fewer clients refute half of it
Z = 0.25
ONE_SHOT: dict[str, Any] = {**SMALL, "noise": Z, "gram_noise": Z, "tasks": 2}
LOSSES: dict[str, Any] = {**SMALL, "noise": Z}
AUDITED: list[tuple[Any, Any]] = [
    (TrainingAudit(), FedAvg(**LOSSES, dp_unit="example")),
    (LossAudit(), SRFCA(**LOSSES)),
    (LossAudit(), CFL(**LOSSES, fallback=0.3)),
    (GramAudit(), OneShot(**ONE_SHOT)),
    (EigenvectorAudit(), OneShot(**ONE_SHOT, gram_mechanism="naive")),
    (LossAudit(), SRFCA(**LOSSES, dp_unit="example")),
    (LossAudit(), CFL(**LOSSES, fallback=0.3, dp_unit="example")),
]
IDS = ["training", "srfca", "cfl", "gram", "eigenvectors", "srfca-example", "cfl-example"]


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=60, samples=4)


def distance(planted: Planted) -> float:
    """Return an estimate of μ."""
    values = np.asarray([planted.statistics[client] for client in range(len(planted.coins))])
    coins = np.asarray(planted.coins)
    present, absent = values[coins], values[~coins]
    variance = (present.var(ddof=1) + absent.var(ddof=1)) / 2
    return float((present.mean() - absent.mean()) / np.sqrt(variance))


@pytest.mark.exhaustive  # `tests/audits/test_claims.py` has these with fewer clients
@pytest.mark.parametrize(("attack", "made"), AUDITED, ids=IDS)
def test_bounds_are_not_above_the_ledger_and_halved_noise_is_refuted(
    attack: Any, made: Any, federation: Federation
) -> None:
    honest = attack.planted_in(made, federation, FULL)
    with halved_noise():
        halved = attack.planted_in(made, federation, FULL)
    assert honest.claimed == halved.claimed
    assert honest.claimed == pytest.approx(gaussian_epsilon(1 / Z, dp_audit.DELTA), rel=1e-6)
    # the canary shows by its whole sensitivity, nearly
    assert 0.7 < Z * distance(honest) < 1.4 < Z * distance(halved) < 2.7
    assert honest.score(attack.scorer, federation).value <= honest.claimed
    assert halved.score(attack.scorer, federation).value > halved.claimed


@pytest.mark.exhaustive  # as above
@pytest.mark.parametrize("kind", ["plain", "blocks"])
@pytest.mark.parametrize("unit", ["example", "client"])
def test_signatures_show_canaries_by_their_whole_sensitivity(
    unit: str, kind: str, federation: Federation
) -> None:
    made = Signature(
        signature_noise=Z, signature_releases=1, signature_blocks=kind, dp_unit=unit, mask="none"
    )
    honest = SignatureAudit().planted_in(made, federation, FULL)
    with halved_noise():
        halved = SignatureAudit().planted_in(made, federation, FULL)
    # a sample, or a client, that is replaced by its opposite moves a signature by 2S/n, or 2S
    expected = gaussian_epsilon(2 / Z, dp_audit.DELTA)
    assert honest.claimed == halved.claimed == pytest.approx(expected, rel=1e-6)
    assert 0.7 < Z * distance(honest) / 2 < 1.4 < Z * distance(halved) / 2 < 2.7
    assert honest.score(SignatureAudit.scorer, federation).value <= honest.claimed
    assert halved.score(SignatureAudit.scorer, federation).value > halved.claimed


@pytest.mark.parametrize(
    ("repeat", "made", "sentence"),
    [
        (planted_losses, FedAvg(**LOSSES), "no losses leave clients"),
        (planted_losses, CFL(**LOSSES), "no losses leave clients"),
        (planted_losses, SRFCA(**LOSSES, distance="l2"), "no losses leave clients"),
        (planted_rows, OneShot(**ONE_SHOT, gram_mechanism="naive"), "no relevance follows"),
        (planted_rows, OneShot(**ONE_SHOT, dp_unit="client"), "a canary row is one sample"),
        (planted_rows, OneShot(**ONE_SHOT, features="dct"), "features of samples"),
        (planted_eigenvectors, OneShot(**ONE_SHOT), "noise of their own"),
        (planted_samples, FedAvg(**LOSSES), "no noise is in the training"),
        (planted_signatures, FLHC(**SMALL, pre_rounds=1), "no gradient signatures"),
        (planted_signatures, CFL(**SMALL, signature="gradient", fallback=0.3), "kept aside"),
    ],
)
def test_releases_that_are_not_there_are_refused(
    repeat: Callable[..., Planted], made: Any, sentence: str, federation: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence):
        repeat(made, federation, FULL)


def test_canaries_take_no_more_memory_than_they_may(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dp_audit, "MOST_NUMBERS", 1000)
    with pytest.raises(UsageError, match="numbers in memory"):
        planted_rows(OneShot(**ONE_SHOT), federation, FULL)
    with pytest.raises(UsageError, match="numbers in memory"):
        dp_audit.planted_updates(FedAvg(**LOSSES), federation, FULL)


def test_only_an_active_server_asks(federation: Federation) -> None:
    with pytest.raises(UsageError, match="only a server asks"):
        LossAudit().planted_in(SRFCA(**LOSSES), federation, FULL, (3,))


def test_a_canary_without_the_noise_of_training_is_refused(federation: Federation) -> None:
    with pytest.raises(UsageError, match="noise of dp_unit example is in the training"):
        dp_audit.planted_updates(FedAvg(**LOSSES, dp_unit="example"), federation, FULL)


@pytest.mark.parametrize("share", [0.07, 0.1, 0.3, 0.5, 0.9])
def test_one_sample_is_kept_aside(share: float) -> None:
    size = release_audits._one_aside(share)
    assert size >= 2
    assert int(share * size) == 1


def test_an_attack_without_canaries_says_so_and_scores_with_them() -> None:
    few = digits(clients=6, samples=4)
    fitted = FedAvg(**SMALL).fit(few, FULL)
    for name in ("losses", "gram", "eigenvectors", "signatures", "training"):
        reason = result_of(attack_named(f"dp-audit-{name}"), fitted, few)
        assert isinstance(reason, str) and reason.startswith("not applicable: the run has no can")
    coins = dp_audit.heads(6)
    planted = Planted({client: float(coins[client]) for client in range(6)}, coins, 1.0)
    taps = (dp_audit.tap_of(coins),)
    assert score_of(LossAudit(planted), fitted, few, taps=taps).value > 1000


def test_sampled_batches_are_judged_without_gaussians(federation: Federation) -> None:
    made = FedAvg(**SMALL, noise=Z, dp_unit="example", batch_size=2)
    planted = planted_samples(made, federation, FULL)
    assert not planted.gaussian
    assert planted.score(LossAudit.scorer, federation).metric.endswith("two worlds")
    assert planted.score(LossAudit.scorer, federation).value <= planted.claimed
    bare = planted_samples(made.set_params(noise=0.0), federation, FULL)
    assert bare.claimed == np.inf and bare.gaussian
    # 200 clients, whose statistics differ by 4 standard deviations
    coins = dp_audit.heads(200)
    draw = np.random.default_rng(0)
    values = draw.normal(size=200) + 4 * np.asarray(coins)
    apart = Planted(dict(enumerate(values.tolist())), coins, 1.0, gaussian=False)
    many = digits(clients=200, samples=2)
    assert 1.5 < apart.score(LossAudit.scorer, many).value < gaussian_epsilon(4.0, dp_audit.DELTA)
