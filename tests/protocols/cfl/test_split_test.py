"""What the split test sees: norms without the noise that clients add, of uniform and weighted
means.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from securecluster.clustering.similarity import cosine, gram
from securecluster.messaging.messages import Rows
from securecluster.messaging.replies import Replies, Sums
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.cfl.split_test import collect_updates, split_statistics
from securecluster.protocols.common.comparison.compressed_updates import CompressedUpdate
from securecluster.protocols.common.messages import Update

D, SIGMA = 100_000, 0.02  # noise of norm 6.3 on updates of norm about 1.4


def replies(weighted: bool, noisy: bool) -> Replies[Any]:
    """Clients 0, 1, 2 of one cluster and 4, 5 of another; client 3 did not reply."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(5, D, generator=generator) + torch.randn(D, generator=generator)) / D**0.5
    rows += noisy * SIGMA * torch.randn(5, D, generator=generator)
    size = Rows(torch.tensor([1.0, 5.0, 2.0, 3.0, 3.0])) if weighted else None
    return Replies((0, 1, 2, 4, 5), Update(Rows(rows), size), (3,), 9)


@pytest.mark.parametrize("weighted", [False, True])
def test_norms_are_those_of_the_updates_without_noise(weighted: bool) -> None:
    quiet: Any = SimpleNamespace(noise=lambda field: Pipeline().noise(D))
    loud: Any = SimpleNamespace(
        noise=lambda field: Pipeline([Clip(1.0), Noise(1.0, SIGMA)]).noise(D)
    )
    members = [0, 1, 2, 3]
    clean = split_statistics(quiet, replies(weighted, noisy=False), 0, members)
    found = split_statistics(loud, replies(weighted, noisy=True), 0, members)
    blind = split_statistics(quiet, replies(weighted, noisy=True), 0, members)
    assert found.max_norm == pytest.approx(clean.max_norm, rel=0.2)
    assert found.mean_norm == pytest.approx(clean.mean_norm, rel=0.2)
    assert blind.max_norm > 4 * clean.max_norm and blind.mean_norm > 2 * clean.mean_norm
    assert found.evidence.ids == [0, 1, 2] and not found.complete


def test_a_pipeline_adds_up_the_noise_of_its_stages() -> None:
    assert Pipeline().noise(10) == 0
    assert Pipeline([Clip(1.0)]).noise(10) == 0
    assert Pipeline([Clip(1.0), Noise(1.0, SIGMA)]).noise(D) == pytest.approx(40, rel=3e-3)


@pytest.mark.parametrize("placement", ["local", "central"])
def test_in_brief_the_mean_comes_from_the_sum_and_what_splits_from_sketches(placement: str) -> None:
    """Noise of a mean is every client's in its sum, over their number squared, or a trusted
    server's once.
    """
    generator = torch.Generator().manual_seed(2)
    q, s, members = 4096, 40, list(range(40))
    rows = (torch.randn(s, q, generator=generator) + torch.randn(q, generator=generator)) / q**0.5
    each = 0.0 if placement == "central" else SIGMA
    delta = torch.nn.functional.pad(rows, (0, D - q))  # longer rows of the same norms
    total = delta.sum(0) + SIGMA * torch.randn(D, generator=generator) * (s**0.5 if each else 1.0)
    got = Replies(
        tuple(members),
        CompressedUpdate(Rows(rows + 0.05 * torch.randn(s, q, generator=generator))),
        (),
        4,
    )
    sums = Sums(tuple(members), Update(Rows(total[None]), None), (s,), (), 5)
    noise = {"compressed": 0.05**2 * q, "delta": SIGMA**2 * D}
    net: Any = SimpleNamespace(
        noise=noise.__getitem__, agreed={"sketch": q, "placement": placement}
    )
    statistics = split_statistics(net, got, 0, members, sums)
    assert statistics.mean is not None and statistics.mean_norm == pytest.approx(
        float(rows.mean(0).norm()), rel=0.05
    )
    assert float(statistics.mean.norm()) > (1.1 if each else 1.005) * statistics.mean_norm
    assert statistics.max_norm == pytest.approx(2**0.5, rel=0.05)
    alpha, off = torch.from_numpy(statistics.evidence.similarities()), ~torch.eye(s, dtype=bool)
    true = cosine(gram(rows))
    assert float((alpha - true)[off].mean()) == pytest.approx(0, abs=0.02)
    assert statistics.evidence.step == 4 and statistics.complete


def test_in_brief_without_a_sum_no_cluster_is_stationary() -> None:
    got = Replies((0, 1), CompressedUpdate(Rows(torch.ones(2, 8))), (), 4)
    net: Any = SimpleNamespace(
        noise=lambda field: 0.0, agreed={"sketch": None, "placement": "local"}
    )
    statistics = split_statistics(net, got, 0, [0, 1])
    assert statistics.mean is None and statistics.mean_norm == float("inf")


@pytest.mark.parametrize(
    ("replied", "asked"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2, 3]),  # client 4 is alone in its cluster
        ([0, 1, 4], [0, 1]),
        ([0, 1, 2], [0, 1]),
        ([0, 2, 4], []),
        ([4], []),
        ([], []),
    ],
)
@pytest.mark.parametrize("compresses", [False, True])
def test_full_updates_are_summed_over_clusters_of_two_replies_or_more(
    replied: list[int], asked: list[int], compresses: bool
) -> None:
    labels = [0, 0, 1, 1, 2]
    sums: list[dict[str, Any]] = []
    replies = Replies(tuple(replied), None, (), 3)
    net: Any = SimpleNamespace(
        cohorts=None,
        least_members=2,
        gather=lambda *_, **__: replies,
        sum=lambda method, query, **named: sums.append(named) or "the sums",
    )
    outbox: Any = SimpleNamespace(message_for=lambda to: None, acknowledge=lambda ids: None)
    found, summed = collect_updates(net, outbox, range(5), labels, compresses)
    assert found is replies
    if not compresses or not asked:
        assert summed is None
        assert not sums
        return
    (named,) = sums
    assert summed == "the sums"
    assert named["to"] == asked
    assert named["by"] == [labels[i] for i in asked]
    assert named["groups"] == 3
