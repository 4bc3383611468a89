"""Every protocol × unit of privacy × placement: the properties a private run must keep whatever it
does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance
import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.errors import UpdateError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import RELAY, Rows, reply_header
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    NSIM,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
)
from securecluster.runtime.endpoint import message_types
from securecluster.runtime.run import Run
from securecluster.runtime.transport import Framed

CLIENT = {"clip": 1.0, "noise": 0.7, "dp_unit": "client"}
EXAMPLE = {"clip": 1.0, "noise": 0.7, "dp_unit": "example"}
WAYS: dict[str, dict[str, Any]] = {
    "local": CLIENT,
    "central": {**CLIENT, "placement": "central"},
    "example": EXAMPLE,
}
FULL = Settings(transcript="full")


OWN: dict[str, tuple[type[ClusteringProtocol], dict[str, Any]]] = {
    "cfl": (CFL, {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}),
    "cfl-sketch": (
        CFL,
        {
            "criterion": "absolute",
            "eps1": 100.0,
            "eps2": 1e-6,
            "gamma_max": 0.0,
            "sketch": 64,
            "clusterer": "average",
        },
    ),
    "flhc": (FLHC, {"pre_rounds": 1}),
    "flhc-compressed": (
        FLHC,
        {"pre_rounds": 1, "sketch": 64, "compress": "8bit", "clusterer": "spectral"},
    ),
    "srfca-loss": (SRFCA, {"local_rounds": 1, "refine": 1}),
    "srfca-l2": (SRFCA, {"local_rounds": 1, "refine": 1, "distance": "l2"}),
    "oneshot": (OneShot, {"tasks": 2, "gram_noise": 0.7}),
    "nsim": (
        NSIM,
        {
            "synthetic": 8,
            "walks": conformance.digits,
            "radius": 0.0,
            "layer": "last",
            "local_rounds": 1,
            "eps": 1.0,
        },
    ),
    "ifca": (IFCA, {"k": 2, "starts": 2, "start_rounds": 1}),
    "local-kmeans": (LocalKMeans, {"k": 2, "local_rounds": 1}),
    "random": (RandomClusters, {"k": 2}),
    "fedavg": (FedAvg, {}),
    "finetune": (FineTune, {"tune_rounds": 1}),
}
EVERY = [(name, way) for name in OWN for way in WAYS]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair network for NSIM that hardly trains, and no pictures."""
    conformance.make_brief(monkeypatch)


def method(name: str, **params: Any) -> Any:
    """A protocol of few rounds, under a permutation."""
    kind, own = OWN[name]
    return kind(**{"rounds": 3, "epochs": 1, "mask": "permutation", **own, **params})


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_whatever_leaves_writes_an_event_and_with_noise_epsilon_is_finite(
    name: str, way: str, small: Federation
) -> None:
    fitted = method(name, **WAYS[way]).fit(small, FULL)
    written = Counter(
        (e.method, f, e.round, i) for e in fitted.ledger_.events for f in e.fields for i in e.ids
    )
    assert written == conformance.events_owed(fitted)
    price = fitted.ledger_.price(1e-5)
    assert fitted.ledger_.exact() == [] and 0 < price.epsilon < math.inf, price
    assert fitted.ledger_.price(1e-6).epsilon > price.epsilon


@pytest.mark.parametrize("name", OWN)
def test_without_noise_epsilon_is_infinite(name: str, small: Federation) -> None:
    own = {"gram_noise": 0.0} if name == "oneshot" else {}
    for params in ({}, {"clip": 1.0}, {"clip": 1.0, "dp_unit": "example"}):
        fitted = method(name, **{**own, **params}).fit(small)
        assert fitted.ledger_.epsilon == math.inf and fitted.ledger_.exact(), params


def test_a_client_that_trains_alone_releases_nothing(small: Federation) -> None:
    for params in WAYS.values():
        assert Local(rounds=2, epochs=1, **params).fit(small).ledger_.epsilon == 0


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_the_server_replays_and_frames_are_as_long_as_told(
    name: str, way: str, small: Federation
) -> None:
    made = method(name, **WAYS[way])
    fitted = made.fit(small, Settings(transcript="full", dropout=0.2))
    assert made.replay(fitted.transcript_, made.config(small, "float32")) == fitted.server_state_
    for position, entry in enumerate(fitted.transcript_.entries):
        call, answer = fitted.transcript_.content(position)
        if answer.reply is not None and call.verb != RELAY:
            up = [
                len(wire.encode(reply_header(call.header(call.to.index(i))), answer.reply, n))
                for n, i in enumerate(answer.ids)
            ]
            assert up == [length for length in entry.up if length]  # who is silent sends none


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_a_stopped_run_ends_as_if_it_never_had_been(
    name: str, way: str, small: Federation, tmp_path: Path
) -> None:
    settings = Settings(transcript="sizes", dropout=0.1)
    whole = method(name, **WAYS[way]).fit(small, settings)

    def interrupt(line: dict[str, object]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method(name, **WAYS[way]).fit(small, settings, folder=tmp_path / "run", report=interrupt)
    resumed = method(name, **WAYS[way]).fit(small, settings, folder=tmp_path / "run")
    assert torch.equal(resumed.client_models_.values, whole.client_models_.values)
    assert (
        resumed.ledger_ == whole.ledger_
        and resumed.bytes_ == whole.bytes_
        and resumed.server_state_ == whole.server_state_
    )


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_nodes_with_one_client_each_draw_as_they_do_together(
    name: str, way: str, small: Federation
) -> None:
    made, settings = method(name, **WAYS[way]), Settings(dtype="float64")
    nodes = [made.build_client(small, settings, [i]) for i in range(6)]
    doors = {i: node.answer_frame for i, node in enumerate(nodes)}
    net = made.build_network(
        Framed(doors, lambda call: message_types(made.client, call)[1]),
        made.config(small, "float64"),
    )
    state = made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    together = made.fit(small, settings)
    assert list(state.labels) == list(together.labels_)
    finals = (
        torch.cat([made.final_models(node.client, state).values for node in nodes])
        if name != "ifca"
        else None
    )
    if finals is not None:
        torch.testing.assert_close(finals, together.client_models_.values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["cfl", "cfl-sketch", "flhc", "srfca-loss", "srfca-l2", "ifca"])
def test_models_that_cost_nothing_are_made_of_what_clients_were_sent(
    name: str, dropout: float, small: Federation
) -> None:
    """Clients with other data who are asked the same post the same."""
    made, draw = method(name, rounds=4, participation=0.6, **CLIENT), np.random.default_rng(1)
    fitted, posted = made.fit(small, Settings(transcript="full", dropout=dropout)), 0
    shards = tuple(
        replace(s, x=draw.random(s.x.shape).astype(np.float32), y=draw.permutation(s.y))
        for s in small.shards
    )
    others = made.build_client(replace(small, shards=shards), Settings())
    for position in range(len(fitted.transcript_.entries)):
        call, told = fitted.transcript_.content(position)
        if told.reply is not None:
            again = others.answer(call.select([call.to.index(i) for i in told.ids]))
            if call.method == ("send_model" if name == "ifca" else "post"):
                assert torch.equal(again.reply.delta.values, told.reply.delta.values)
                posted += len(told.ids)
            elif call.method == "train":
                assert not torch.equal(again.reply.delta.values, told.reply.delta.values)
    assert posted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWN)
def test_the_target_is_met_and_the_noise_is_not_wasted(
    name: str, way: str, small: Federation
) -> None:
    own = {"gram_noise": 0.0} if name == "oneshot" else {}
    made = method(name, **{**own, **WAYS[way], "noise": 0.0, "target_epsilon": 20.0})
    fitted = made.fit(small)
    spent = fitted.ledger_.price(1e-5).epsilon
    assert 0 < spent <= 20.0
    assert made.config(small, "float32")["noise"] > 0.05


@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
@pytest.mark.parametrize("name", ["fedavg", "cfl", "flhc"])
def test_a_clip_that_cuts_nothing_is_a_uniform_average(
    name: str, mask: str, small: Federation
) -> None:
    """All clients of this federation hold equally many samples, so uniform and weighted averages
    agree.
    """
    assert len({len(s.y) for s in small.shards}) == 1
    plain, clipped = (
        method(name, mask=mask).fit(small),
        method(name, mask=mask, clip=1e9).fit(small),
    )
    assert list(plain.labels_) == list(clipped.labels_)
    torch.testing.assert_close(
        plain.client_models_.values, clipped.client_models_.values, rtol=1e-4, atol=1e-6
    )


def test_central_noise_on_a_mean_is_smaller_by_the_root_of_the_clients(small: Federation) -> None:
    """One round has a learning rate of next to nothing.

    What the models move is the noise alone.
    """
    moved = {}
    for way in ("local", "central"):
        fitted = FedAvg(rounds=1, epochs=1, lr=1e-9, mask="none", **WAYS[way]).fit(small)
        start = method("fedavg").build_client(small, Settings()).client.cohort.start
        moved[way] = float((fitted.client_models_.values[0] - start).square().mean().sqrt())
    assert moved["local"] == pytest.approx(0.7 / math.sqrt(6), rel=0.05)
    assert moved["central"] == pytest.approx(0.7 / 6, rel=0.05)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"noise": 1.0}, "without a clip"),
        ({"target_epsilon": 1.0}, "without a clip"),
        ({"clip": 1.0, "noise": 1.0, "target_epsilon": 1.0}, "give one of them"),
        ({"clip": 0.0}, "clip = 0.0"),
        ({"clip": math.nan}, "clip = nan"),
        ({"clip": 1.0, "noise": -1.0}, "noise = -1.0"),
        ({"clip": 1.0, "noise": math.inf}, "noise = inf"),
        ({"clip": 1.0, "noise": True}, "noise = True"),
        ({"clip": 1.0, "noise": 1e-200}, "from 1e-09 to 1e"),  # its square is 0
        ({"clip": 1.0, "noise": 1e200}, "from 1e-09 to 1e"),
        ({"clip": 1e200}, "clip = 1e"),
        ({"clip": 10**400}, "at most 1e"),
        ({"clip": 1e-44}, "from 1e-12"),
        ({"clip": 1.0, "target_epsilon": 10**400}, "target_epsilon = 1"),
        ({"delta": 0.0}, "delta = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"placement": "here"}, "placement 'here'"),
        ({"dp_unit": "record"}, "dp_unit 'record'"),
        (
            {"clip": 1.0, "noise": 1.0, "placement": "central", "dp_unit": "example"},
            "leave the placement local",
        ),
        ({"clip": 1.0, "average": "weighted"}, "average uniform"),
        ({"clip": 1.0, "target_epsilon": 0.0}, "target_epsilon = 0.0"),
    ],
)
def test_options_that_cannot_protect_are_refused_in_one_sentence(
    params: dict[str, Any], sentence: str, small: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence) as told:
        CFL(rounds=1, **params).fit(small)
    assert "\n" not in str(told.value)


def overflowing(federation: Federation, client: int) -> Federation:
    """The same with one client's features 10^30 times as large: finite numbers, of which no
    network's gradient is.
    """
    shards = list(federation.shards)
    shards[client] = replace(
        shards[client], x=(shards[client].x * np.float32(1e30)).astype(np.float32)
    )
    return replace(federation, shards=tuple(shards))


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_a_client_whose_training_overflows_changes_no_sentence_and_no_release(
    name: str, way: str, small: Federation
) -> None:
    """Ending with an error in one world and not in the other would be a release without noise."""
    there = method(name, **WAYS[way]).fit(overflowing(small, 3), FULL)
    gone = method(name, **WAYS[way]).fit(small, FULL)
    first = [
        (e.method, e.fields, e.mechanism, e.ids)
        for e in (there.ledger_.events[0], gone.ledger_.events[0])
    ]
    assert first[0] == first[1]
    assert 0 < there.ledger_.price(1e-5).epsilon < math.inf
    for position in range(there.transcript_.count):
        reply = there.transcript_.content(position)[1].reply
        for value in vars(reply).values() if reply is not None else ():
            table = value.table if isinstance(value, Rows) else None
            assert table is None or not table.is_floating_point() or bool(table.isfinite().all())


def test_without_noise_the_same_client_is_named(small: Federation) -> None:
    with pytest.raises(UpdateError, match="not finite"):
        FedAvg(rounds=2, epochs=1).fit(overflowing(small, 3))
    with pytest.raises(UpdateError, match="not finite"):
        FedAvg(rounds=2, epochs=1, clip=1.0).fit(overflowing(small, 3))


def first_rows(fitted: ClusteringProtocol, call_of: str = "contribute") -> torch.Tensor:
    """What clients sent to the first call of a method."""
    for position in range(fitted.transcript_.count):
        call, answer = fitted.transcript_.content(position)
        if call.method == call_of:
            rows: torch.Tensor = answer.reply.delta.values.double()
            return rows
    raise AssertionError(f"no {call_of}")


@pytest.mark.parametrize("way", ["local", "example"])
def test_two_runs_under_one_seed_share_no_noise(way: str, small: Federation) -> None:
    """Of the same updates at two noise levels, 2·y₁ − y₂ would be the updates themselves."""

    def run(noise: float, **more: Any) -> torch.Tensor:
        params = {
            **WAYS[way],
            "rounds": 1,
            "epochs": 1,
            "batch_size": 1 << 20,
            "noise": noise,
            **more,
        }
        return first_rows(FedAvg(**params).fit(small, FULL))

    exact, low, high = run(0.0), run(5.0), run(10.0)
    taken = torch.nn.functional.cosine_similarity(2 * low - high, exact, dim=1)
    assert float(taken.abs().max()) < 0.3
    # another configuration in anything at all
    for changed in (
        {"delta": 1e-6},
        {"participation": 0.99},
    ):
        noise, other = low - exact, run(5.0, **changed) - exact
        assert float(torch.nn.functional.cosine_similarity(noise, other, dim=1).abs().max()) < 0.2
    assert torch.equal(run(5.0), low)
