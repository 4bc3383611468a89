"""CFL and FL+HC with sketches and compression: what leaves, what stays as it was, and what happens
to those who drop out in between.
"""

from __future__ import annotations

import math
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation, Iid, LabelSwap
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, PolicyError, UpdateError, UsageError
from securecluster.messaging.messages import Call, Empty
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.compression.sketches import Sketch
from securecluster.protocols import CFL, FLHC, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.run import Run
from securecluster.runtime.transport import InProcess, Recorded

FULL = Settings(transcript="full")
WAYS: list[dict[str, Any]] = [
    {"sketch": 64},
    {"sketch": 64, "compress": "4bit", "mask": "rotation"},
    {"compress": "8bit", "clusterer": "kmeans"},
    {"compress": "topk:0.1", "mask": "none"},
]
HAAR: dict[str, Any] = {"sketch": 64, "mask": "haar", "model": "linear"}
SPLITS: dict[str, Any] = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}


def method(kind: type[Any], **params: Any) -> Any:
    """Few rounds, and clusters in the second."""
    return kind(**{"rounds": 3, **({"pre_rounds": 1} if kind is FLHC else SPLITS), **params})


def replies(fitted: Any, name: str) -> list[torch.Tensor]:
    """The rows of every answer to a call, as they came."""
    found = []
    for position, entry in enumerate(fitted.transcript_.entries):
        if entry.method == name:
            (rows,) = (
                v.values
                for v in vars(fitted.transcript_.content(position)[1].reply).values()
                if v is not None
            )
            found.append(rows)
    return found


def test_a_brief_is_the_sketch_of_the_update_and_the_sum_is_the_updates(small: Federation) -> None:
    (delta,) = replies(CFL(rounds=1, mask="none").fit(small, FULL), "train")
    told = CFL(rounds=1, mask="none", sketch=64).fit(small, FULL)
    (short,), (summed,) = (
        replies(told, "send_compressed_update"),
        replies(told, "contribute_kept_update"),
    )
    torch.testing.assert_close(
        short, Sketch(64, Randomness(0)).forward(delta, 1), rtol=0, atol=1e-6
    )
    assert torch.equal(summed, delta)
    coded = CFL(rounds=1, mask="none", compress="8bit").fit(small, FULL)
    (rows,) = replies(coded, "send_compressed_update")
    assert rows.dtype == torch.uint8 and rows.shape == (6, 4 + 4810)


@pytest.mark.few(3)
@pytest.mark.parametrize("way", [*WAYS, HAAR], ids=str)
@pytest.mark.parametrize("average", ["uniform", "weighted"])
def test_one_round_moves_the_models_as_it_does_without_briefs(
    way: dict[str, Any], average: str
) -> None:
    federation = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=6, seed=0
    ).select([0, 1, 2])
    shard = federation.shards[0]
    cut = type(shard)(**{**vars(shard), "x": shard.x[:20], "y": shard.y[:20]})
    federation = type(federation)(**{**vars(federation), "shards": (cut, *federation.shards[1:])})
    params = {
        "rounds": 1,
        "mask": "none",
        "average": average,
        **({"model": "linear"} if "model" in way else {}),
    }
    plain = CFL(**params).fit(federation)
    told = CFL(**{**params, **way}).fit(federation)
    moved = torch.linalg.norm(
        plain.client_models_.values
        - build_client(CFL(**params), federation, Settings()).client.cohort.start
    )
    assert (
        torch.linalg.norm(told.client_models_.values - plain.client_models_.values) <= 1e-6 * moved
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [CFL, FLHC])
def test_clusters_come_from_few_bytes(kind: type[Any]) -> None:
    federation = Federation.simulate("digits", seed=0)
    coarse = {"level": 0.01} if kind is CFL else {}
    plain = kind(rounds=15, **coarse).fit(federation, FULL)
    for way in ({"compress": "4bit"}, {"sketch": 64, "clusterer": "average"}):
        fitted = kind(rounds=15, **coarse, **way).fit(federation, FULL)
        assert fitted.agreement_["exact"], way
        short = next(
            e for e in fitted.transcript_.entries if e.method == "send_compressed_update"
        ).up[0]
        whole = next(e for e in plain.transcript_.entries if e.method == "train").up[0]
        assert (
            whole > 4 * 4810
            and short - (whole - 4 * 4810) <= (4 * 64 if "sketch" in way else 4 + 4810 // 2) + 32
        )
        assert list(fitted.join(federation)) == list(fitted.labels_)


IID = [
    (kind, clusterer, way)
    for kind in (CFL, FLHC)
    for clusterer in ("average", "spectral", "kmeans")
    for way in ({}, {"sketch": 64, "clip": 1.0, "noise": 0.06})
]
# each clusterer with both protocols, plain with one of them and by noisy sketches with the other
TURNS = [(CFL, "average"), (FLHC, "spectral"), (CFL, "kmeans")]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "clusterer", "way"),
    [
        case if ((case[0], case[1]) in TURNS) == (not case[2]) else cases.exhaustive(*case)
        for case in IID
    ],
    ids=str,
)
def test_iid_clients_stay_together_whatever_the_clusterer(
    kind: type[Any], clusterer: str, way: dict[str, Any]
) -> None:
    federation = Federation.simulate("digits", scenario=Iid(), seed=1)
    assert kind(rounds=15, clusterer=clusterer, **way).fit(federation).labels_.max() == 0


@pytest.mark.filterwarnings("ignore:.*lost in the noise|.*noise is the likeliest reason")
def test_noise_that_drowns_whole_updates_leaves_sketches_clusters() -> None:
    federation = Federation.simulate("digits", seed=0)
    params: dict[str, Any] = {
        "rounds": 11, "clip": 1.0, "noise": 0.1, "clusterer": "kmeans", "placement": "central",
    }  # fmt: skip
    whole, told = (FLHC(**params, sketch=q).fit(federation).agreement_["ari"] for q in (None, 64))
    assert whole < 0.5 and told > 0.8


def served(made: Any, federation: Federation, lost: Any) -> tuple[Any, Any, Any]:
    """Return the server's state, the clients and the network of a run.

    The clients of `lost(call)` do not reply.
    """
    endpoint = build_client(made, federation, Settings())
    net = build_network(
        made,
        Recorded(InProcess(endpoint.answer, lost), Transcript("sizes")),
        made.config(federation, "float32"),
    )
    return (
        made.run_server(net, Run(begin=lambda number: setattr(net, "round", number))),
        endpoint.client,
        net,
    )


def test_who_tells_a_brief_and_hands_nothing_over_is_left_out_of_the_mean(
    small: Federation,
) -> None:
    params: dict[str, Any] = {"rounds": 1, "mask": "none", "sketch": 64}
    _, client, _ = served(
        CFL(**params), small, lambda call: {2} if call.method == "contribute_kept_update" else set()
    )
    (delta,) = replies(CFL(rounds=1, mask="none").fit(small, FULL), "train")
    start = client.cohort.start
    torch.testing.assert_close(
        client.models.row(2) - start, delta[[0, 1, 3, 4, 5]].mean(0), rtol=0, atol=1e-6
    )


def test_where_nobody_hands_over_nothing_moves_and_nothing_is_split(small: Federation) -> None:
    state, client, _ = served(
        method(CFL, sketch=64),
        small,
        lambda call: set(range(6)) if call.method == "contribute_kept_update" else set(),
    )
    assert set(state.labels) == {0}
    assert all(torch.equal(row, client.cohort.start) for row in client.models.values)


def test_a_split_leaves_nobody_alone(small: Federation) -> None:
    lone = False
    for clusterer in ("paper", "kmeans"):
        alone = method(CFL, rounds=6, min_size=2, clusterer=clusterer).fit(small).labels_
        labels = (
            method(CFL, rounds=6, min_size=2, clusterer=clusterer, sketch=256).fit(small).labels_
        )
        assert np.bincount(labels).min() >= 2
        lone |= np.bincount(alone).min() == 1
    assert lone and labels.max() > 0


def test_an_update_told_in_brief_leaves_in_sums_only(small: Federation) -> None:
    made = CFL(rounds=1, mask="none", sketch=64)
    endpoint, letter = (
        build_client(made, small, Settings()),
        PendingUpdates.start(6, fresh=False).message_for([0, 1]),
    )
    config = config_hash(made.config(small, "float32"))
    early = Call(config, "contribute_kept_update", "sum", 1, 1, (0, 1), Empty(), (2, 2))
    with pytest.raises(UpdateError, match="ask for a compressed update first"):
        endpoint.answer(early)
    endpoint.answer(Call(config, "send_compressed_update", "gather", 1, 1, (0, 1), letter, (1, 1)))
    assert endpoint.answer(early).reply.delta.values.shape == (2, 4810)
    for verb, members in (("gather", (1, 1)), ("sum", (1, 1))):
        with pytest.raises(PolicyError):
            endpoint.answer(
                Call(config, "contribute_kept_update", verb, 1, 1, (0, 1), Empty(), members)
            )


def test_a_forged_brief_is_refused_by_name(small: Federation) -> None:
    made = CFL(rounds=1, compress="8bit")
    endpoint = build_client(made, small, Settings())

    def forge(call: Call) -> Any:
        answer = endpoint.answer(call)
        if call.method == "send_compressed_update":
            table = answer.reply.compressed.table
            object.__setattr__(answer.reply.compressed, "table", table[:, :-1])
        return answer

    net = build_network(made, InProcess(forge), made.config(small, "float32"))
    with pytest.raises(FrameError, match=r"does not parse|the frame is refused"):
        made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))


def test_a_brief_and_its_update_are_two_releases(small: Federation) -> None:
    """Two Gaussian releases at multiplier z a round compose to one at z/√(2·rounds) (Dong, Roth, Su
    2022).
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    mu = math.sqrt(2 * 3) / 4.0
    delta = lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - 1e-5  # noqa: E731
    fitted = method(CFL, sketch=64, clip=1.0, noise=4.0).fit(small)
    assert fitted.ledger_.epsilon == pytest.approx(brentq(delta, 0, 50), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        (CFL, {"sketch": 0}, "whole number from 1"),
        (CFL, {"sketch": 4810}, "no shorter"),
        (CFL, {"sketch": 64, "similarity": "gradient"}, "choose one"),
        (CFL, {"compress": "2bit"}, "unknown compression"),
        (CFL, {"compress": "topk:0.1", "mask": "rotation"}, "spreads"),
        (FLHC, {"compress": "topk:3"}, "keeps no share"),
        (FLHC, {"sketch": 64, "metric": "l1", "linkage": "average"}, "l1"),
        (FLHC, {"clusterer": "spectral", "threshold": 3.0}, "leave one of them out"),
        (FLHC, {"clusterer": "dbscan"}, "unknown clusterer"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    kind: type[Any], params: dict[str, Any], says: str, small: Federation
) -> None:
    with pytest.raises(UsageError, match=says):
        kind(**params).fit(small)
