"""Two sums of hidden: what their difference tells of one client, and what clients refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, digits, result_of, scene

from securecluster import Dirichlet, Federation
from securecluster.attacks import hidden_sums
from securecluster.attacks.base import Tap, View
from securecluster.attacks.experiments import probe, tapped, without_client
from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.attacks.secure_sum_conformance import LyingServer, Plan, members
from securecluster.attacks.views import knowledge_of, view_of
from securecluster.audits.run_audit import Adversary, finding_of, known_samples
from securecluster.errors import UsageError
from securecluster.messaging.messages import Call, Empty
from securecluster.parties.endpoints import build_client
from securecluster.protections.secure_sums import server as sum_server
from securecluster.protections.secure_sums.double_mask import UnmaskingGuard
from securecluster.protocols import FedAvg, Hidden
from securecluster.protocols.hidden.client import HiddenClient
from securecluster.protocols.hidden.protocol import HiddenState
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel

RESAMPLES = (200, 200)

CLIENTS = 10
SMALL: dict[str, Any] = {
    "rounds": 1, "epochs": 1, "batch_size": 30, "model": "linear", "mask": "none", "k": 2,
}  # fmt: skip
PLAIN = (("aggregation", "plain"),)
# ε = 2 for the whole run
NOISY = (("clip", 1.0), ("target_epsilon", 2.0), ("placement", "distributed"))
ATTACKS: dict[str, type[hidden_sums.TwoSums]] = {
    "point": hidden_sums.HiddenDifferencing,
    "cluster": hidden_sums.HiddenCluster,
    "labels": hidden_sums.HiddenLabelCounts,
    "membership": hidden_sums.HiddenMembership,
}


@cache
def federation() -> Federation:
    return digits(scenario=Dirichlet(alpha=1.0), clients=CLIENTS, samples=30)


@cache
def runs(options: tuple[tuple[str, Any], ...]) -> tuple[Hidden, list[Tap], Mapping[int, View]]:
    """A run, its taps, and the server's views of runs without one client each."""
    made = Hidden(**{**SMALL, **dict(options)})
    fitted, taps = tapped(made, federation(), FULL)
    second = {}
    for client in range(CLIENTS):
        second[client] = view_of(without_client(made, federation(), client, FULL))
    return fitted, taps, second


def scored(attack: type[hidden_sums.TwoSums], options: tuple[tuple[str, Any], ...]) -> Any:
    fitted, taps, second = runs(options)
    return result_of(attack(second), fitted, federation(), known_samples(federation(), True), taps)


@pytest.mark.always
def test_two_runs_tell_the_point_of_the_client_that_left() -> None:
    fitted, taps, second = runs(PLAIN)
    guess = hidden_sums.HiddenDifferencing(second).run(view_of(fitted), knowledge_of(fitted))
    (points,) = [tap.reply.point.values for tap in taps if tap.method == "send_point"]
    assert list(guess.values) == list(range(CLIENTS))
    for client, point in guess.values.items():
        assert np.allclose(point, points[client].numpy(), atol=1e-5)


def test_with_residuals_two_runs_tell_the_parts_of_the_point_and_the_cluster() -> None:
    options = (*PLAIN, ("residuals", True))
    fitted, taps, second = runs(options)
    guess = hidden_sums.HiddenDifferencing(second).run(view_of(fitted), knowledge_of(fitted))
    (parts,) = [tap.reply.parts.values for tap in taps if tap.method == "send_parts"]
    for client, found in guess.values.items():
        assert np.allclose(found, parts[client].flatten().numpy(), atol=1e-5)
    clusters = hidden_sums.HiddenCluster(second).run(view_of(fitted), knowledge_of(fitted)).values
    assert [clusters[client] for client in range(CLIENTS)] == list(fitted.labels_)
    for name in ("point", "cluster"):
        assert scored(ATTACKS[name], options).verdict == BETTER
        noisy = scored(ATTACKS[name], (*NOISY, ("residuals", True)))
        assert noisy.verdict == CHANCE and noisy.units == CLIENTS


def test_with_label_maps_two_runs_tell_the_class_means_and_not_their_labels() -> None:
    options = (*PLAIN, ("points", "labels"))
    fitted, taps, second = runs(options)
    guess = hidden_sums.HiddenDifferencing(second).run(view_of(fitted), knowledge_of(fitted))
    (means,) = [tap.reply.anchors.values for tap in taps if tap.method == "send_means"]
    assert list(guess.values) == list(range(CLIENTS))
    for client, found in guess.values.items():
        assert np.allclose(found, means[client].flatten().numpy(), atol=1e-5)
    reason = hidden_sums.HiddenCluster(second).applies(view_of(fitted), knowledge_of(fitted))
    assert reason is not None and "not applicable" in reason


def test_two_runs_tell_the_counts_and_the_clusters() -> None:
    fitted, _, second = runs(PLAIN)
    view = view_of(fitted)
    knowledge = knowledge_of(fitted, samples=known_samples(federation(), False))
    counts = hidden_sums.HiddenLabelCounts(second).run(view, knowledge).values
    clusters = hidden_sums.HiddenCluster(second).run(view, knowledge).values
    for client, shard in enumerate(federation().shards):
        assert counts[client].tolist() == np.bincount(shard.y, minlength=10).tolist()
        # the labels of the results are the clients' own
        assert clusters[client] == fitted.labels_[client]
    assert view.clusters == {} and len(set(clusters.values())) == 2


@pytest.mark.parametrize("name", ATTACKS)
def test_without_noise_the_attack_is_better_than_chance(name: str) -> None:
    found = scored(ATTACKS[name], PLAIN)
    assert found.verdict == BETTER and found.units == CLIENTS


@pytest.mark.parametrize("name", ATTACKS)
def test_with_noise_it_is_no_better_than_chance(name: str) -> None:
    fitted = runs(NOISY)[0]
    assert fitted.ledger_.price(1e-5).epsilon <= 2
    found = scored(ATTACKS[name], NOISY)
    # some draws of the noise leave it undecided
    assert found.verdict != BETTER and found.units == CLIENTS


def test_secure_sums_do_not_prevent_it_and_masks_prevent_half_of_it() -> None:
    masked = (("mask", "permutation"),)
    point = scored(hidden_sums.HiddenDifferencing, masked)
    assert point.value == pytest.approx(1.0, abs=1e-5)
    said = "not applicable: updates are under masks, which are not those of another sum"
    assert scored(hidden_sums.HiddenLabelCounts, masked) == said
    assert scored(hidden_sums.HiddenMembership, masked) == said


def test_one_run_over_the_same_clients_has_no_differences() -> None:
    fitted = runs(PLAIN)[0]
    view, knowledge, _ = scene(fitted, federation(), known_samples(federation(), True))
    for attack in ATTACKS.values():
        assert attack().applies(view, knowledge) == hidden_sums.NO_PAIR
    without = knowledge_of(fitted)
    assert hidden_sums.HiddenMembership(runs(PLAIN)[2]).applies(view, without) == (
        "not applicable: the adversary has no samples to ask about"
    )
    other = FedAvg(rounds=1, epochs=1, model="linear").fit(federation(), FULL)
    assert hidden_sums.HiddenDifferencing().applies(view_of(other), knowledge_of(other)) == (
        "not applicable: clients are not clustered by sums of hidden"
    )


class AsksAgain(Hidden):
    """A server that asks for the sum of points once more, in another call, without one client."""

    left_out = 4

    def run_server(self, net: ServerChannel, run: Run) -> HiddenState:
        others = [client for client in net.clients if client != self.left_out]
        net.sum(HiddenClient.send_point, Empty(), to=others)
        return super().run_server(net, run)


def test_a_server_that_asks_again_in_another_call_gets_the_same_sum_again() -> None:
    fitted, _ = tapped(AsksAgain(**SMALL, cohort_size=0), federation(), FULL)
    knowledge = knowledge_of(fitted)
    assert (
        hidden_sums.HiddenDifferencing().applies(view_of(fitted), knowledge) == hidden_sums.NO_PAIR
    )


def test_without_the_rule_for_rows_that_never_change_it_needs_no_second_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(UnmaskingGuard, "_check_same_rows", lambda *rest: None)
    monkeypatch.setattr(sum_server._GroupSum, "hold_to", lambda *rest: None)
    fitted, taps = tapped(AsksAgain(**SMALL, cohort_size=0), federation(), FULL)
    guess = hidden_sums.HiddenDifferencing().run(view_of(fitted), knowledge_of(fitted))
    assert list(guess.values) == [4]
    (first,) = (
        tap.reply.point for tap in taps if tap.method == "send_point" and len(tap.ids) == CLIENTS
    )
    assert np.allclose(guess.values[4], first.values[4].numpy(), atol=1e-4)


class Liar(LyingServer):
    """A server of hidden that lies about a sum of points."""

    def __init__(self) -> None:
        made = Hidden(**SMALL)
        fitted = type(made)(**made.get_params()).fit(federation(), FULL)
        calls: dict[str, Call] = {}
        for position, entry in enumerate(fitted.transcript_.entries):
            calls.setdefault(entry.method, fitted.transcript_.content(position)[0])
        self.plan = Plan(made, federation(), calls, calls["send_point"])  # type: ignore[arg-type]
        self._signed = True
        self._nodes = {}


EVERYONE_BUT_ONE = tuple(range(CLIENTS - 1))
LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "other members in the same attempt": ("send_point", members(EVERYONE_BUT_ONE)),
    "other members once the sum is open": (
        "reveal_shares", {"attempt": 1, **members(EVERYONE_BUT_ONE)},
    ),
    "one member": ("sum_keys", members([0])),
    "a plain sum": ("sum_keys", {"group": ()}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_within_a_call_clients_refuse_sums_that_single_one_out(lie: str) -> None:
    upto, changes = LIES[lie]
    server = Liar()
    for method in ("sum_offer", "sum_keys", "send_point", "reveal_shares"):
        server.ask(method, 0)
        if method == upto:
            break
    found = server.lie("send_point", 0, **changes)
    assert found.refused


def test_a_client_does_not_assign_itself_to_other_centres() -> None:
    made = Hidden(**SMALL)
    fitted, _ = tapped(made, federation(), FULL)
    calls = {}
    for position, entry in enumerate(fitted.transcript_.entries):
        calls.setdefault(entry.method, fitted.transcript_.content(position)[0])
    node = build_client(made, federation(), FULL, [0])
    call = calls["assign"].select([0])
    assert not probe(node, call).refused
    swapped = call.query.centres.value.flip(0)
    query = type(call.query)(call.query.mean, call.query.basis, type(call.query.centres)(swapped))
    assert probe(node, Call(**{**vars(call), "query": query})).refused


def test_an_audit_repeats_the_run_for_the_server_alone() -> None:
    fitted, taps = tapped(Hidden(**{**SMALL, **dict(PLAIN)}), federation(), FULL)
    server = Adversary(("server",), (), "the server")
    found = finding_of(hidden_sums.HiddenDifferencing(), fitted, federation(), server, taps)
    assert found.score is not None and found.outcome == BETTER and found.score.units == CLIENTS
    alone = finding_of(
        hidden_sums.HiddenDifferencing(), fitted, federation(), Adversary((1,), (1,), ""), taps
    )
    assert alone.reason == hidden_sums.NO_PAIR


def test_a_run_without_a_client_has_the_others_data() -> None:
    fitted = without_client(Hidden(**SMALL), federation(), 3, FULL)
    names = [name for client, name in enumerate(federation().names) if client != 3]
    assert list(fitted.kept_.learned.names) == names
    with pytest.raises(UsageError, match="no client 10"):
        without_client(Hidden(**SMALL), federation(), 10, FULL)


def test_a_candidates_gradient_is_that_of_softmax_regression() -> None:
    fitted = runs(PLAIN)[0]
    samples = known_samples(federation(), True)
    assert samples is not None
    x = samples[0][:3].reshape(3, -1).astype(float)
    y = samples[1][:3]
    knowledge = knowledge_of(fitted, samples=(samples[0][:3], y))
    views = knowledge.parameters(knowledge.initial.double())
    weights, bias = (views[name].numpy() for name in knowledge.network.shapes)
    logits = x @ weights.T + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    errors = shares - np.eye(10)[y]
    expected = np.hstack([(errors[:, :, None] * x[:, None]).reshape(3, -1), errors])
    assert np.allclose(hidden_sums.candidate_gradients(knowledge), expected, atol=1e-5)
    network = replace(knowledge.network)
    vars(network)["stack"] = None  # as of a network whose layers are not fused
    by_vmap = hidden_sums.candidate_gradients(replace(knowledge, network=network))
    assert np.allclose(by_vmap, expected, atol=1e-5)
    assert torch.equal(knowledge.initial, knowledge_of(fitted).initial)
