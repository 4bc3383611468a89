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
from numpy.typing import NDArray
from scipy import stats
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.bounds import Real, Upto
from securecluster.messaging.messages import Empty, Rows
from securecluster.models import validation
from securecluster.privacy.dp.auditing import Audit, directions, grams, lower_bound, summed, updates
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise, TrustedCurator
from securecluster.privacy.dp.ledger import Event, Ledger
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline, Stage
from securecluster.protections.secure_sums.graph import Plan
from securecluster.protocols.common.comparison.gram_mechanism import GramNoise
from securecluster.runtime.call_context import CallContext, outside_run
from securecluster.runtime.endpoint import GATHER, SUM, Endpoint, answers
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

# of which a secure sum is unmasked, by its members
SURVIVORS = Plan(2).least_survivors

# scales are extreme on purpose
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")

Array = NDArray[np.float64]
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


def curator(share: float = 1.0) -> TrustedCurator:
    return TrustedCurator(NORM, Z * share, NoiseStreams.derived(Randomness(4), "run"))


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
def test_half_the_noise_is_refuted_at_little_privacy_and_at_much() -> None:
    for z in (0.1, 2.0):
        for kind, honest in ((NoiseStreams, True), (Halved, False)):
            audit, net = gathered([Clip(NORM), Noise(NORM, z)], kind=kind)
            (event,) = net.state.ledger.events
            assert event.noise_multiplier == z
            assert (audit.mu <= 1 / z) == honest


@pytest.mark.parametrize(("share", "honest"), [(1.0, True), (0.5, False)])
def test_a_trusted_servers_noise_is_audited_in_rows_and_in_one_sum(
    share: float, honest: bool
) -> None:
    audit, _ = gathered([Clip(NORM)], curator(share))
    assert (audit.mu <= 1 / Z) == honest

    def release(rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        net = network(rows, [Clip(NORM)], curator(share))
        return net.sum(Holder.row, Empty(), to=ids).rows.values.table[0]

    audit = lower_bound(*summed(release, directions(2 * RUNS, 2 * RUNS, 0), NORM))
    assert (audit.mu <= 1 / Z) == honest
    assert audit.mu > 0.75 / Z


@pytest.mark.parametrize(("share", "honest"), [(1.0, True), (0.5, False)])
def test_noise_in_shares_is_audited_in_the_sum_of_the_fewest_survivors(
    share: float, honest: bool
) -> None:
    streams = NoiseStreams.derived(Randomness(7), "run")
    mechanism = SkellamMechanism(NORM, Z * share, SURVIVORS, streams)
    members, d = 4, 40
    plan = mechanism.plan(d, members)
    canary = torch.full((d,), NORM / math.sqrt(d))
    nothing = torch.zeros(d)

    def released(held: bool, step: int) -> float:
        total = torch.zeros(d, dtype=torch.int32)
        for client in range(plan.shares):
            row = canary if held and client == 0 else nothing
            total += mechanism.encode(row, plan, client, "row", step)
        return float(mechanism.decode(total, plan).double() @ canary.double()) / NORM

    present = np.array([released(True, step) for step in range(RUNS)])
    absent = np.array([released(False, step) for step in range(RUNS, 2 * RUNS)])
    audit = lower_bound(present, absent)
    assert (audit.mu <= 1 / Z) == honest
    assert audit.mu > 0.75 / Z


@pytest.mark.parametrize(("share", "honest"), [(1.0, True), (0.5, False)])
def test_gram_matrices_are_audited_by_a_canary_row(share: float, honest: bool) -> None:
    mechanism = GramNoise(Z * share, "gram", False)
    streams = NoiseStreams.derived(Randomness(5), "run")
    noise = ClientNoise("example", NORM, Z, 1.0, streams)
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 12)) / 12)
    turns = [directions(12, 12, seed) for seed in range(RUNS // 12)]

    def matrix(x: torch.Tensor, client: int) -> torch.Tensor:
        return mechanism.matrix(x, outside_run(noise, [client]))

    audit = lower_bound(*grams(matrix, torch.cat(turns), rows))
    assert (audit.mu <= 1 / Z) == honest
    assert audit.mu > 0.75 / Z


@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "honest"), [(1.0, True), (0.5, False)])
@pytest.mark.parametrize("unit", ["client", "example"])
def test_rows_of_losses_are_audited_along_their_sum(unit: str, share: float, honest: bool) -> None:
    k, n, bound = 4, 10, 1.7
    noise = ClientNoise(unit, NORM, Z * share, bound, NoiseStreams.derived(Randomness(6), "run"))
    means = np.full((2 * RUNS, k), bound / 3)
    # one sample's losses are B, or all are; in the other world 0
    means[:RUNS] += bound / n if unit == "example" else 2 * bound / 3
    means[RUNS:] -= bound / 3 if unit == "client" else 0
    context = outside_run(noise, range(2 * RUNS), step=1)
    told = context.release_losses(means, [n] * 2 * RUNS).numpy().sum(1)
    audit = lower_bound(told[:RUNS], told[RUNS:])
    assert (audit.mu <= 1 / Z) == honest
    assert audit.mu > 0.75 / Z


def trained(plan: LocalTraining, n: int, runs: int = RUNS) -> tuple[Array, Array]:
    """What clients' updates say along the gradient of their first sample, with it, and with a
    sample without a gradient.
    """
    d, rng = 5, np.random.default_rng(0)
    x = rng.normal(size=(2 * runs, n, 1, 1, d))
    x[..., 0] = 0  # there are no biases, so no other sample has a gradient there
    x[:, 0] = 0
    x[:runs, 0, ..., 0] = 100.0
    arrays = {f"c{k:04d}": (own, np.arange(n) % 2) for k, own in enumerate(x)}
    federation = Federation.from_arrays(arrays, test={name: ([], []) for name in arrays}, seed=5)
    flat = validation.build(
        nn.Sequential(nn.Flatten(), nn.Linear(d, 2, bias=False)), federation.shape, 2, Randomness(5)
    )
    cpu, secret = torch.device("cpu"), NoiseStreams.derived(Randomness(7), "run")
    clients = LocalTrainer(federation, flat, Randomness(5), cpu, torch.float64, secret=secret)
    start = Rows(torch.zeros(1, 2 * d, dtype=torch.float64), (0,) * 2 * runs)
    moved = clients.train(start, range(2 * runs), plan, 1).numpy()
    along = (moved[:, 0] - moved[:, d]) / plan.lr
    return along[:runs], along[runs:]


def priced(plan: LocalTraining, n: int, z: float, delta: float) -> float:
    """What the ledger says of a training that claims multiplier z."""
    event = Event(
        "train", "sum", (), 1, (0,), "dp-sgd", z, batch=plan.batch_size, epochs=plan.epochs
    )
    return Ledger([event], {0: n}).price(delta).epsilon


@pytest.mark.parametrize(("share", "honest"), [(1.0, True), (0.5, False)])
def test_a_step_of_dp_sgd_is_audited_by_a_canary_sample(share: float, honest: bool) -> None:
    # the weights stay at 0, where every gradient is largest
    plan = LocalTraining(1e-9, 1, 1 << 62, clip=NORM, noise=Z * share)
    audit = lower_bound(*trained(plan, 6))
    assert (audit.mu <= 1 / Z) == honest
    assert audit.mu > 0.75 / Z
    assert audit.epsilon(DELTA) <= priced(plan, 6, Z * share, DELTA)


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "honest"), [(1.0, True), (0.5, False)])
def test_sampled_steps_of_dp_sgd_are_no_less_private_than_their_price(
    share: float, honest: bool
) -> None:
    plan = LocalTraining(1e-9, 2, 2, clip=NORM, noise=share)  # q = 1/3, six steps
    audit = lower_bound(*trained(plan, 6, 1000))
    assert audit.epsilon(0.01) > 0.3  # it sees something
    assert (audit.epsilon(0.2) <= priced(plan, 6, 1, 0.2)) == honest


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
