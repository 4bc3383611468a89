"""Every protocol × unit of privacy × placement: the properties a private run must keep whatever it
does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, NOISE, WAYS

from securecluster import Federation
from securecluster.errors import UpdateError, UsageError
from securecluster.messaging.messages import Rows
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Local, Settings, conformance

NAMES = (
    "cfl", "cfl sketch average", "cfl signature", "flhc", "flhc sketch spectral", "flhc signature",
    "srfca", "srfca l2", "oneshot noise", "pacfl noise", "signature noise", "signature blocks",
    "signature auto", "nsim", "hidden", "ifca", "clove", "cflgp", "rdpcfl", "flux", "local-kmeans",
    "random", "fedavg", "finetune", "mrmtl",
)  # fmt: skip
# hyper-parameters by which a variant has no noise of its own
OWN_NOISE: dict[str, dict[str, Any]] = {
    "cfl signature": {"signature_noise": 0.0},
    "flhc signature": {"signature_noise": 0.0},
    "oneshot noise": {"gram_noise": 0.0},
    "pacfl noise": {"gram_noise": 0.0},
    "signature noise": {"signature_noise": 0.0},
    "signature blocks": {"signature_noise": 0.0},
    "signature auto": {"signature_noise": 0.0},
}
EVERY = [(name, way) for name in NAMES for way in WAYS]
EVERY.remove(("hidden", "example"))  # whose sums protect whole clients
# Every variant under noise, each way under one protocol whose updates are read one by one, one
# that needs sums alone, and one that clusters by losses
COVERED = [(name, "client") for name in NAMES if name not in ("flhc", "random", "ifca", "hidden")]
COVERED += [("signature noise", "example"), ("signature auto", "example")]
COVERED += [("flhc", "central"), ("random", "central"), ("ifca", "example")]
COVERED += [("hidden", "central")]
COVERED += [(name, way) for name in ("cfl", "fedavg", "srfca") for way in ("central", "example")]
SHARED = pytest.mark.parametrize(("name", "way"), cases.covering(EVERY, COVERED), scope="module")
SOME = pytest.mark.parametrize(("name", "way"), cases.covering(EVERY, COVERED))


def method(name: str, **params: Any) -> Any:
    """Return a protocol of few rounds, under a permutation."""
    return cases.variant(name, **{"rounds": 3, "epochs": 1, "mask": "permutation", **params})


def private(name: str, way: str, **params: Any) -> Any:
    """Return a protocol of few rounds with noise."""
    return method(name, **{**NOISE, **WAYS[way], **params})


@pytest.fixture(scope="module")
def run(name: str, way: str, small: Federation) -> conformance.Example:
    """One noisy run of a protocol with dropouts, which all `SHARED` tests read."""
    return conformance.example(partial(private, name, way), small, rounds=3)


@pytest.mark.few(6)
@SHARED
def test_whatever_leaves_writes_an_event_and_with_noise_epsilon_is_finite(
    run: conformance.Example,
) -> None:
    ledger = run.fitted.ledger_
    written = Counter(
        (e.method, f, e.round, i) for e in ledger.events for f in e.fields for i in e.ids
    )
    assert written == conformance.events_owed(run.fitted)
    price = ledger.price(1e-5)
    assert ledger.exact() == [] and 0 < price.epsilon < math.inf, price
    assert ledger.price(1e-6).epsilon > price.epsilon


@pytest.mark.few(6)
@SHARED
def test_the_server_replays(run: conformance.Example) -> None:
    conformance.check_replay(run)


@pytest.mark.few(6)
@SHARED
def test_bytes_equal_the_encoded_length_of_every_frame(run: conformance.Example) -> None:
    conformance.check_frames(run.fitted)


@pytest.mark.few(6)
@SHARED
def test_a_stopped_run_ends_as_if_it_never_had_been(
    run: conformance.Example, tmp_path: Path
) -> None:
    whole = run.fitted
    with pytest.raises(KeyboardInterrupt):
        run.make().fit(
            run.federation, run.settings, folder=tmp_path, report=cases.interrupt_after(2)
        )
    resumed = run.make().fit(run.federation, run.settings, folder=tmp_path)
    assert torch.equal(resumed.client_models_.values, whole.client_models_.values)
    assert resumed.ledger_ == whole.ledger_
    assert resumed.bytes_ == whole.bytes_
    assert resumed.server_state_ == whole.server_state_


NO_NOISE: tuple[dict[str, Any], ...] = ({}, {"clip": 1.0}, {"clip": 1.0, "dp_unit": "example"})


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "params"),
    [
        (name, params)
        if params == {"clip": 1.0} or name in ("cfl", "fedavg", "srfca")
        else cases.exhaustive(name, params)
        for name in NAMES
        for params in NO_NOISE
    ],
)
def test_without_noise_epsilon_is_infinite(
    name: str, params: dict[str, Any], small: Federation
) -> None:
    own = OWN_NOISE.get(name, {})
    fitted = method(name, **{**own, **params}).fit(small)
    assert fitted.ledger_.epsilon == math.inf
    assert fitted.ledger_.exact()


def test_a_client_that_trains_alone_releases_nothing(small: Federation) -> None:
    for params in WAYS.values():
        assert Local(rounds=2, epochs=1, **NOISE, **params).fit(small).ledger_.epsilon == 0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of as many parts in every batch, since noise is drawn by the bits of a row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.few(2)
@SOME
def test_nodes_with_one_client_each_draw_as_they_do_together(
    name: str, way: str, small: Federation, one_thread: None
) -> None:
    made = private(name, way)
    state, nodes = cases.serve_nodes(made, small)
    together = made.fit(small, DOUBLE)
    labels = [made.observer.known_labels(node.client, state)[0] for node in nodes]
    if name != "hidden":  # whose server knows no labels
        labels = list(state.labels)
    assert labels == list(together.labels_)
    # IFCA's observer needs all clients, and models that are tuned after the run are compared in
    # tests/protocols/common/test_tuning.py
    finals = (
        torch.cat([made.observer.final_models(node.client, state).values for node in nodes])
        if name not in ("ifca", "finetune")
        else None
    )
    if finals is not None:
        torch.testing.assert_close(finals, together.client_models_.values, rtol=0, atol=1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize("dropout", [cases.exhaustive(0.0), 0.3])
@pytest.mark.parametrize("name", ["cfl", "cfl sketch average", "flhc", "srfca", "srfca l2", "ifca"])
def test_models_that_cost_nothing_are_made_of_what_clients_were_sent(
    name: str, dropout: float, small: Federation
) -> None:
    """Clients with other data who are asked the same post the same."""
    made = private(name, "client", **conformance.SPREAD)
    fitted, posted = made.fit(small, Settings(transcript="full", dropout=dropout)), 0
    free = ("post", "send_model") if name == "ifca" else ("post",)
    others = build_client(made, conformance.other_data(small), Settings())
    for position in range(len(fitted.transcript_.entries)):
        call, told = fitted.transcript_.content(position)
        if told.reply is not None:
            again = others.answer(call.select([call.to.index(i) for i in told.ids]))
            if call.method in free:
                assert torch.equal(again.reply.delta.values, told.reply.delta.values)
                posted += len(told.ids)
            elif call.method == "train":
                assert not torch.equal(again.reply.delta.values, told.reply.delta.values)
    assert posted


@pytest.mark.always
@pytest.mark.few(2)
@SOME
def test_the_target_is_met_and_the_noise_is_not_wasted(
    name: str, way: str, small: Federation
) -> None:
    own = OWN_NOISE.get(name, {})
    made = private(name, way, **own, noise=0.0, target_epsilon=20.0)
    fitted = made.fit(small)
    spent = fitted.ledger_.price(1e-5).epsilon
    assert 0 < spent <= 20.0
    assert made.config(small, "float32")["noise"] > 0.05


@pytest.mark.parametrize(
    ("name", "mask"),
    cases.covering(
        [
            (name, mask)
            for name in ("fedavg", "cfl", "flhc")
            for mask in ("none", "permutation", "rotation")
        ],
        [("fedavg", "none"), ("fedavg", "rotation"), ("cfl", "permutation"), ("flhc", "none")],
    ),
)
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
    for way in ("client", "central"):
        fitted = FedAvg(rounds=1, epochs=1, lr=1e-9, mask="none", **NOISE, **WAYS[way]).fit(small)
        start = build_client(method("fedavg"), small, Settings()).client.cohort.start
        moved[way] = float((fitted.client_models_.values[0] - start).square().mean().sqrt())
    assert moved["client"] == pytest.approx(0.7 / math.sqrt(6), rel=0.05)
    assert moved["central"] == pytest.approx(0.7 / 6, rel=0.05)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"noise": 1.0}, "without a clip"),
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


@pytest.mark.few(3)
@SOME
def test_a_client_whose_training_overflows_changes_no_sentence_and_no_release(
    name: str, way: str, small: Federation
) -> None:
    """Ending with an error in one world and not in the other would be a release without noise."""
    there = private(name, way).fit(overflowing(small, 3), FULL)
    gone = private(name, way).fit(small, FULL)
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


@pytest.mark.parametrize("way", ["client", "example"])
def test_two_runs_under_one_seed_share_no_noise(way: str, small: Federation) -> None:
    """Of the same updates at two noise levels, 2·y₁ − y₂ would be the updates themselves."""

    def run(noise: float, **more: Any) -> torch.Tensor:
        params = {
            **NOISE,
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
    for changed in ({"delta": 1e-6}, {"participation": 0.99}):
        noise, other = low - exact, run(5.0, **changed) - exact
        assert float(torch.nn.functional.cosine_similarity(noise, other, dim=1).abs().max()) < 0.2
    assert torch.equal(run(5.0), low)
