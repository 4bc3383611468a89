"""The two-world audit passes what is honest and refutes half the noise, driven through the releases
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch
from scipy import stats

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.bounds import Real, Upto
from securecluster.messaging.messages import Empty, Rows
from securecluster.privacy.dp.auditing import Audit, directions, lower_bound, updates
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise, TrustedCurator
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline, Stage
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, Endpoint, answers
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess

# scales are extreme on purpose
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")

CONFIG = "c" * 32
NORM, Z, DELTA = 0.3, 0.5, 1e-5
RUNS, D = 300, 300


@dataclass(frozen=True, eq=False)
class Values:
    values: Annotated[Rows, Real((Upto("width", 1000),))]


class Holder:
    """Clients that hold one row each."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    @answers(GATHER, SUM, through=("values",))
    def row(self, context: CallContext, query: Empty) -> Values:
        return Values(Rows(self.rows[list(context.positions)].clone()))


class Less(Noise):
    """Says that it has a multiplier, and draws half of it."""

    def __init__(self, norm: float, multiplier: float) -> None:
        super().__init__(norm, multiplier)
        self._share_multiplier /= 2


class Halved(NoiseStreams):
    """Writes down each multiplier that it is asked for, and draws half of it."""

    def noised(
        self, client: int, purpose: str, step: int, row: torch.Tensor, z: float, reach: float
    ) -> torch.Tensor:
        return super().noised(client, purpose, step, row, z / 2, reach)

    def log(self, client: int, multiplier: float) -> None:
        super().log(client, 2 * multiplier)


def network(
    rows: torch.Tensor,
    stages: Sequence[Stage],
    curator: TrustedCurator | None = None,
    kind: type[NoiseStreams] = NoiseStreams,
) -> ServerChannel:
    pipeline = Pipeline(stages)
    streams = kind.derived(Randomness(3), "run")
    pipeline.arm(streams)
    keys = KeyRing(CONFIG, Randomness(0), lambda seed: None)
    endpoint = Endpoint(Holder(rows), range(len(rows)), CONFIG, pipeline, keys)
    endpoint.noise = ClientNoise("client", NORM, Z, 1.0, streams)
    costs = ReleaseAccounting(pipeline, curator=curator)
    door = InProcess(endpoint.answer)
    return ServerChannel(len(rows), door, CONFIG, pipeline, Randomness(0), costs=costs)


def gathered(
    stages: Sequence[Stage],
    trusted: TrustedCurator | None = None,
    dtype: torch.dtype = torch.float64,
    kind: type[NoiseStreams] = NoiseStreams,
) -> tuple[Audit, ServerChannel]:
    """Each client's row as the server reads it, canaries first."""
    nets: list[ServerChannel] = []

    def release(rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        whole = torch.zeros(2 * RUNS, rows.shape[1], dtype=rows.dtype)
        whole[list(ids)] = rows
        nets.append(network(whole, stages, trusted, kind))
        return nets[-1].gather(Holder.row, Empty(), to=ids).rows.values.values

    return lower_bound(*updates(release, directions(RUNS, D, 0).to(dtype), NORM)), nets[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_leave_their_clients_are_as_private_as_their_stages_say(
    dtype: torch.dtype,
) -> None:
    audit, net = gathered([Clip(NORM), Noise(NORM, Z)], dtype=dtype)
    (event,) = net.state.ledger.events
    assert event.noise_multiplier == Z
    assert 0.75 / Z < audit.mu <= 1 / Z
    assert 1 < audit.epsilon(DELTA) <= net.state.ledger.price(DELTA).epsilon


@pytest.mark.always
def test_half_the_noise_is_refuted() -> None:
    audit, net = gathered([Clip(NORM), Noise(NORM, Z)], kind=Halved)
    (event,) = net.state.ledger.events
    assert event.noise_multiplier == Z
    assert audit.mu > 1.5 / Z
    assert audit.by_rates(0.01) > 1 / Z


def test_half_the_noise_is_priced_as_what_was_drawn() -> None:
    audit, net = gathered([Clip(NORM), Less(NORM, Z)])
    (event,) = net.state.ledger.events
    assert event.noise_multiplier == Z / 2
    assert 1.5 / Z < audit.mu <= 2 / Z


def test_rows_that_are_clipped_too_late_are_refuted() -> None:
    audit, _ = gathered([Clip(2 * NORM), Noise(NORM, Z)])
    assert audit.mu > 1.5 / Z


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize("mu", [0.3, 2.0, 20.0])
def test_bounds_err_as_seldom_as_they_say(mu: float) -> None:
    rng = np.random.default_rng(0)
    audits = [
        lower_bound(rng.normal(7 + 3 * mu, 3, 200), rng.normal(7, 3, 100), 0.9) for _ in range(150)
    ]
    for bound in (lambda a: a.mu, lambda a: a.by_rates(0.1), lambda a: a.by_moments(0.1)):
        wrong = sum(bound(audit) > mu for audit in audits)
        assert stats.binomtest(wrong, len(audits), 0.1, alternative="greater").pvalue > 1e-3
    # exact, not only safe: 15 are expected
    assert sum(audit.by_moments(0.1) > mu for audit in audits) >= 4


@pytest.mark.exhaustive
def test_moments_agree_with_simulated_students_t() -> None:
    rng = np.random.default_rng(1)
    present, absent = rng.normal(1.5, 1, 30), rng.normal(0, 1, 40)
    bound = Audit(present, absent, 0.9).by_moments(0.05)
    a, b = rng.normal(bound, 1, (200_000, 30)), rng.normal(0, 1, (200_000, 40))
    t = stats.ttest_ind(a, b, axis=1).statistic
    assert np.mean(t >= stats.ttest_ind(present, absent).statistic) == pytest.approx(
        0.05, abs=2.5e-3
    )


def test_rates_are_clopper_and_pearsons_of_the_other_half() -> None:
    rng = np.random.default_rng(0)
    present, absent = (rng.random(200) < 0.8).astype(float), (rng.random(160) < 0.1).astype(float)

    def rates(confidence: float) -> tuple[float, float]:
        tests = [stats.binomtest(int(x[1::2].sum()), len(x) // 2) for x in (present, absent)]
        first, second = (test.proportion_ci(confidence, "exact") for test in tests)
        return first.low, second.high

    audit = Audit(present, absent, 0.95)
    low, high = rates(0.95)
    assert audit.by_rates(0.05) == pytest.approx(stats.norm.ppf(low) - stats.norm.ppf(high))
    low, high = rates(0.975)  # two worlds to begin from
    assert audit.epsilon(0.01) == pytest.approx(
        max(math.log((low - 0.01) / high), math.log((1 - high - 0.01) / (1 - low)))
    )


def test_what_shows_nothing_bounds_nothing() -> None:
    rng = np.random.default_rng(0)
    audit = lower_bound(rng.normal(size=100), rng.normal(size=100))
    assert (audit.mu, audit.epsilon(DELTA)) == (0, 0)
    assert lower_bound(rng.normal(size=100) - 3, rng.normal(size=100)).mu == 0
    assert lower_bound(np.ones(30), np.zeros(30)).mu == math.inf


def test_too_little_to_judge_by_is_refused() -> None:
    good = np.arange(40.0)
    with pytest.raises(UsageError, match="at least 20"):
        lower_bound(good[:19], good)
    with pytest.raises(UsageError, match="finite"):
        lower_bound(good, np.full(40, np.nan))
    with pytest.raises(UsageError, match="confidence"):
        lower_bound(good, good, 1.0)
    with pytest.raises(UsageError, match="orthogonal"):
        directions(5, 4, 0)
