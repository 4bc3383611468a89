"""Clip, noise and their draws.

The tests are on bounds, on statistics, and that an answer repeated tells nothing new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from securecluster.core.randomness import Randomness
from securecluster.errors import PolicyError, UpdateError, UsageError
from securecluster.messaging.bounds import Real, Upto
from securecluster.messaging.messages import Empty, Rows
from securecluster.privacy.compression import codecs
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise, TrustedCurator
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.comparison.compressed_updates import CompressedUpdate
from securecluster.runtime.aggregators import Plain
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, Endpoint, answers
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess

DRAWS = NoiseStreams.derived(Randomness(3), "run")


def armed(*stages: object) -> Pipeline:
    pipeline = Pipeline(stages)  # type: ignore[arg-type]
    pipeline.arm(DRAWS)
    return pipeline


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clip_bounds_every_norm_and_leaves_short_rows_as_they_are(dtype: torch.dtype) -> None:
    normal = torch.randn(6, 50, dtype=dtype, generator=torch.Generator().manual_seed(0))
    rows = normal * torch.tensor([[0.0], [1e-3], [0.1], [1], [5], [1e4]])
    out = Clip(2.0).forward(rows, 1)
    exact = rows.double().numpy()
    norms = np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-300)
    wanted = exact * np.minimum(1, 2.0 / norms)
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=2e-5)
    assert torch.equal(out[:3], rows[:3])
    assert float(out.double().norm(dim=1).max()) <= 2.0
    assert torch.equal(Clip(2.0).overwrite(rows.clone(), 1), out)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_before_it_is_clipped_and_under_noise_counts_as_zeros(
    bad: float,
) -> None:
    rows = torch.tensor([[1.0, bad], [0.5, 0.5]])
    with pytest.raises(UpdateError, match="not finite"):
        Clip(1.0).forward(rows, 1)
    assert Clip(1.0, nonfinite_as_zeros=True).forward(rows, 1).tolist() == [[0, 0], [0.5, 0.5]]


@given(
    st.floats(1e-12, 1e9),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.floats(-44, 38),
    st.floats(0, 20),
)
def test_no_clipped_row_is_longer_than_the_bound(
    norm: float, d: int, seed: int, size: float, spread: float
) -> None:
    """Also where float32 has no normal number for the factor, or for what it is multiplied by."""
    draw = np.random.default_rng(seed)
    values = draw.choice([-1, 1], d) * 10.0 ** np.clip(size - spread * draw.random(d), -44, 38)
    row = torch.from_numpy(values.astype(np.float32))[None]
    found = Clip(norm).forward(row, 1).double().norm()
    assert float(found) <= norm
    kept = Clip(norm).forward(row.double(), 1).norm()
    assert float(kept) <= norm


def test_noise_has_the_stated_deviation_and_looks_gaussian() -> None:
    rows = torch.zeros(20, 5000, dtype=torch.float64)
    rows += torch.arange(20.0)[:, None] * 1e-9  # rows that differ
    sent = armed(Clip(2.0), Noise(2.0, 1.5)).forward(rows, 4, ids=range(20), field="delta")
    noise = (sent - rows) / 3.0
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    bound = stats.chi2.ppf([1e-4, 1 - 1e-4], noise.numel())
    assert bound[0] < float(noise.square().sum()) < bound[1]
    across = np.corrcoef(noise.numpy())
    assert np.abs(across[~np.eye(20, dtype=bool)]).max() < 6 / math.sqrt(5000)


def test_the_same_answer_has_the_same_noise_and_anything_else_another() -> None:
    pipeline, row = armed(Clip(1.0), Noise(1.0, 1.0)), torch.linspace(-0.1, 0.1, 400)[None]

    def noise(
        changed: float = 0.0, step: int = 1, client: int = 5, field: str = "delta"
    ) -> torch.Tensor:
        given = row.clone()
        given[0, 0] += changed
        return pipeline.forward(given, step, ids=[client], field=field)[0] - given[0]

    assert torch.equal(noise(), noise())
    for other in (noise(changed=1e-6), noise(step=2), noise(client=6), noise(field="compressed")):
        assert abs(float(np.corrcoef(noise().numpy(), other.numpy())[0, 1])) < 5 / math.sqrt(400)


def test_a_client_in_a_batch_draws_as_it_does_alone() -> None:
    rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    pipeline = armed(Clip(1.0), Noise(1.0, 0.3))
    together = pipeline.forward(rows, 9, ids=[3, 5, 7, 8], field="delta")
    pairs = zip(rows.split(1), (3, 5, 7, 8), strict=True)
    alone = torch.cat([pipeline.forward(row, 9, ids=[i], field="delta") for row, i in pairs])
    assert torch.equal(together, alone)


def test_who_lacks_the_key_draws_another_noise_and_repr_hides_it() -> None:
    row = torch.zeros(1000)
    streams = [NoiseStreams.derived(Randomness(seed), "run") for seed in (3, 4)]
    mine, others = (own.noised(0, "delta", 1, row, 1.0, 1.0) for own in streams)
    assert abs(float(np.corrcoef(mine.numpy(), others.numpy())[0, 1])) < 5 / math.sqrt(1000)
    assert Randomness(3).key("client", 0, "noise").hex() not in repr(DRAWS)


def test_shares_of_noise_add_up_in_a_sum_and_leave_only_in_one() -> None:
    n = 50
    rows = (torch.arange(50.0, dtype=torch.float64)[:, None] * 1e-9).repeat(1, 4000)
    pipeline = armed(Clip(1.0), Noise(1.0, 2.0, shares=n))
    total = (pipeline.forward(rows, 1, ids=range(n), field="delta") - rows).sum(0)
    bound = stats.chi2.ppf([1e-4, 1 - 1e-4], 4000)
    assert bound[0] < float((total / 2.0).square().sum()) < bound[1]
    assert pipeline.shares == n
    assert pipeline.multiplier == 2.0
    assert pipeline.noise(4000) == pytest.approx(4000 * 4.0 / n, rel=3e-3)
    with pytest.raises(UsageError, match="honest"):
        Noise(1.0, 1.0, shares=0)


@dataclass(frozen=True, eq=False)
class Row:
    delta: Annotated[Rows, Real((Upto("width", 1000),))]


class Toy:
    """A client whose answer is a row of zeros."""

    @answers(GATHER, SUM, through=("delta",))
    def tell(self, context: CallContext, query: Empty) -> Row:
        return Row(Rows(torch.zeros(len(context.ids), 8)))


class Blind(Plain):
    """An aggregator that says that it reads no reply."""

    server_reads_replies = False


def test_shares_of_noise_wait_for_an_aggregator_that_reads_no_reply() -> None:
    pipeline = armed(Clip(1.0), Noise(1.0, 2.0, shares=3))
    keys = KeyRing("c", Randomness(0), lambda seed: None)
    endpoint = Endpoint(Toy(), range(4), "c", pipeline, keys)
    endpoint.noise = ClientNoise("client", 1.0, 2.0, 1.0, DRAWS)
    with pytest.raises(UsageError, match="reads every reply"):
        ServerChannel(4, InProcess(endpoint.answer), "c", pipeline, Randomness(0))
    net = ServerChannel(4, InProcess(endpoint.answer), "c", pipeline, Randomness(0), Blind())
    with pytest.raises(PolicyError, match="3 shares"):
        net.gather(Toy.tell, Empty(), to=[0, 1, 2, 3])
    with pytest.raises(PolicyError, match="sum over 2"):
        net.sum(Toy.tell, Empty(), to=[0, 1])
    total = net.sum(Toy.tell, Empty(), to=[0, 1, 2, 3])
    assert total.counts == (4,) and bool(total.rows.delta.table.any())
    (event,) = net.state.ledger.events
    assert (event.mechanism, event.noise_multiplier) == ("gaussian", 2.0)


def test_a_trusted_server_noises_sums_over_somebody_alone() -> None:
    curator, rows = TrustedCurator(2.0, 0.5, DRAWS), torch.zeros(3, 6000, dtype=torch.float64)
    out = curator.add(rows, 7, "delta", counts=(4, 0, 2))
    assert not out[1].any()
    assert torch.equal(out, curator.add(rows, 7, "delta", counts=(4, 0, 2)))
    for row in (out[0], out[2]):
        assert float(row.std()) == pytest.approx(1.0, rel=0.05)
    assert abs(float(np.corrcoef(out[0].numpy(), out[2].numpy())[0, 1])) < 5 / math.sqrt(6000)


def test_the_order_holds_and_noise_is_somebodys() -> None:
    noise = Noise(1.0, 1.0)
    with pytest.raises(UsageError, match="noise without a clip"):
        Pipeline([noise])
    with pytest.raises(UsageError, match="clip cannot follow noise"):
        Pipeline([noise, Clip(1.0)])
    with pytest.raises(UsageError, match="noise cannot follow mask"):
        Pipeline([Clip(1.0), *build("permutation"), noise])
    with pytest.raises(PolicyError, match="ids"):
        noise.forward(torch.zeros(1, 3), 1)
    with pytest.raises(UsageError, match="keys"):
        Pipeline([Clip(1.0), Noise(1.0, 1.0)]).forward(torch.zeros(1, 3), 1, ids=[0])


def test_what_is_sealed_or_derived_goes_through_its_part_of_the_stages() -> None:
    pipeline = Pipeline([Clip(1.0), Noise(1.0, 1.0), *build("permutation")])
    assert [s.name for s in pipeline.noising_stages.stages] == ["clip", "noise"]
    assert [s.name for s in pipeline.masking_stages.stages] == ["permutation"]
    assert pipeline.clips and not pipeline.masking_stages.clips


@pytest.mark.parametrize("compress", ["8bit", "4bit", "1bit", "topk:0.5"])
def test_a_trusted_server_bounds_what_codes_stand_for_before_it_adds_noise(compress: str) -> None:
    """Numbers just above half a level are rounded up: of 50,000 at 4 bits, a clipped row comes out
    nearly twice as long.
    """
    rows = torch.full((1, 50_000), 1.001)
    rows[0, 0] = {"8bit": 254, "4bit": 14}.get(compress, 1.0)
    pipeline = Pipeline([Clip(2.0), *codecs.build(compress, 50_000)])
    release = ReleasePolicy((GATHER,), through=("compressed",))
    sent = pipeline.forward(rows, 1)
    assert compress != "4bit" or float(pipeline.decode(sent).norm()) > 3.9
    whole = Pipeline([Clip(2.0)], fields={"compressed": pipeline})
    # with less noise, float32 would cut the row's numbers below the bound, clipped or not
    costs = ReleaseAccounting(whole, curator=TrustedCurator(2.0, 1e-4, DRAWS))
    read = costs.read(release, CompressedUpdate(Rows(sent)), 1).compressed.values
    assert float(read.double().norm()) <= 2.0 * (1 + 1e-3)
