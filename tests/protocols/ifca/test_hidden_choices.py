"""IFCA under secure sums: the server reads no choice and no update of a single client, whoever is
lost and whatever it claims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, Served, run_server, serve, two_clusters
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.cli.main import main
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.messages import Call, Response, Shared
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import IFCA
from securecluster.protocols.ifca import hidden_server
from securecluster.protocols.ifca.hidden_client import HiddenChoiceClient
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM
from securecluster.runtime.transport import InProcess
from securecluster.statements import privacy_section

Lie = Callable[[Call], Call]


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


def make(**params: Any) -> Any:
    """IFCA with two models, hidden choices and one start of two rounds.

    Its clients are in no cohorts: they are lost one by one.
    """
    small: dict[str, Any] = {"k": 2, "starts": 1, "rounds": 2, "epochs": 1, "model": "linear"}
    secure: dict[str, Any] = {"aggregation": "secagg", "cohort_size": 0, "mask": "none"}
    return IFCA(**{**small, **secure, **params})


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that lets client i find the lowest loss with the model `choices[i]`."""
    losses_of = HiddenChoiceClient.mean_losses

    def fix(*choices: int) -> None:
        def fixed(self: Any, context: CallContext, query: Any) -> NDArray[np.float64]:
            losses = losses_of(self, context, query)
            for n, client in enumerate(context.ids):
                losses[n] += 1.0
                losses[n, choices[client]] = 0.5
            return losses

        monkeypatch.setattr(HiddenChoiceClient, "mean_losses", fixed)

    return fix


def models(served: Served, made: Any) -> torch.Tensor:
    found: torch.Tensor = made.observer.final_models(served.endpoint.client, served.state).values
    return found


def plain_and_hidden(
    federation: Federation, lost: Callable[[Call], set[int]] = lambda call: set(), **params: Any
) -> tuple[torch.Tensor, torch.Tensor, Served]:
    """The clients' models with and without secure sums, and the run with them."""
    open_run = make(aggregation="plain", **params)
    hidden_run = make(**params)
    plain = serve(open_run, federation, lost)
    hidden = serve(hidden_run, federation, lost)
    return models(plain, open_run), models(hidden, hidden_run), hidden


# --- the same models ---


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [
        {"mask": "permutation", "starts": 2, "start_rounds": 1},
        {"mask": "rotation", "momentum": 0.5, "epochs": 2},
        {"clip": 0.5, "k": 3},
    ],
)
def test_models_are_those_of_plain_sums_where_every_choice_is_shared(
    params: dict[str, Any], federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 1, 0, 1, 1, 0)
    plain, hidden, served = plain_and_hidden(federation, **params)
    torch.testing.assert_close(hidden, plain, rtol=0, atol=1e-6)
    assert served.state.final.counts[:2] == [3, 3]
    assert not served.endpoint.client.unshared
    assert not torch.allclose(hidden[0], hidden[1], atol=1e-3)


def test_who_alone_chose_a_model_trains_alone_and_moves_it_for_nobody_else(
    federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 1, 0, 0, 0)
    plain, hidden, served = plain_and_hidden(federation, rounds=3)
    # its own model is that of a run that averages it alone
    torch.testing.assert_close(hidden, plain, rtol=0, atol=1e-6)
    client = served.endpoint.client
    assert client.unshared == {2}
    start = client.cohort.drawn("start", 0, 1)
    shared = client.model_sets[0][1].models
    assert all(torch.equal(shared.row(i), start) for i in range(6))
    assert not torch.allclose(hidden[2], start, atol=1e-3)
    assert (served.state.running.pending[0].number, served.state.running.pending[1].number) == (
        3,
        0,
    )
    assert make().observer.known_labels(client, served.state) == [0, 0, 1, 0, 0, 0]


def test_an_average_replaces_what_a_client_trained_alone(
    federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 1, 0, 0, 0)
    made = make(rounds=1)
    served = serve(made, federation)
    client = served.endpoint.client
    before = models(served, made)[2]
    choose(0, 0, 1, 0, 1, 1)
    served.net.round = 2
    hidden_server.average_unseen(served.net, served.state.running, None, served.net.clients, 3)
    hidden_server.deliver_unseen(served.net, served.state.running, None)
    after = models(served, made)
    assert not client.unshared
    torch.testing.assert_close(after[2], after[5], rtol=0, atol=0)
    assert not torch.allclose(before, after[2], atol=1e-4)


# --- clients that are lost between the counts and the blocks ---


def lost_in(method: str, *clients: int, times: int = 99) -> Callable[[Call], set[int]]:
    """Lose clients in the first calls of a method."""
    calls = []

    def lost(call: Call) -> set[int]:
        if call.method != method:
            return set()
        calls.append(call)
        return set(clients) if len(calls) <= times else set()

    return lost


@pytest.mark.parametrize("choices", [(0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 0, 0)])
def test_a_single_loss_after_the_count_releases_nothing(
    choices: tuple[int, ...], federation: Federation, choose: Callable[..., None]
) -> None:
    choose(*choices)
    served = serve(make(rounds=1), federation, lost_in("contribute_blocks", 5))
    assert not any(queue.number for queue in served.state.running.pending)
    methods = [entry.method for entry in served.transcript.entries]
    assert methods.count("contribute_blocks") >= 5
    assert methods.count("reveal_shares") == 2  # of the counts, in the round and at the end
    assert "contribute_blocks" not in {event.method for event in served.net.state.ledger.events}


def test_a_client_that_revealed_no_share_of_the_counts_contributes_all_the_same(
    federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 0, 1, 1, 1)
    calm = serve(make(rounds=1), federation)
    served = serve(make(rounds=1), federation, lost_in("reveal_shares", 0))
    assert served.net.state.lost == {}
    assert torch.equal(models(served, make()), models(calm, make()))


def test_no_weight_leaves_a_client_unless_it_is_asked_for(
    federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 0, 1, 1, 1)
    exact = serve(make(rounds=1, exact_weights=True), federation)
    equal = serve(make(rounds=1), federation)
    # all clients have as many samples, so that weights change nothing
    torch.testing.assert_close(models(equal, make()), models(exact, make()), rtol=0, atol=1e-6)
    for served, sent in ((exact, True), (equal, False)):
        replies = [
            served.transcript.content(k)[1].reply
            for k, entry in enumerate(served.transcript.entries)
            if entry.method == "contribute_blocks"
        ]
        assert [reply.weight is not None for reply in replies] == [sent]
    named = [line for line in make(exact_weights=True).disclosures().server if "exact" in line]
    assert any("numbers of samples" in line for line in named)
    assert not any("numbers of samples" in line for line in make().disclosures().server)


def test_two_counts_that_differ_in_one_client_tell_its_choice(
    federation: Federation, choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exact counts cannot hide. The privacy report says so."""
    choose(0, 0, 0, 1, 1, 1)
    seen = []
    counts_of = hidden_server.counted_blocks.counts_of

    def counts(counted: Any) -> list[int] | None:
        found = counts_of(counted)
        seen.append(np.array(found))
        return found

    monkeypatch.setattr(hidden_server.counted_blocks, "counts_of", counts)

    def lost(call: Call) -> set[int]:
        return {3} if (call.method, call.round) == ("count_choice", 2) else set()

    serve(make(rounds=2), federation, lost)
    assert list(seen[0] - seen[1]) == [0, 1]
    assert any("difference of two such counts" in line for line in make().disclosures().server)


def test_a_sum_that_failed_is_attempted_again_with_everyone(
    federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 0, 1, 0, 2)
    params: dict[str, Any] = {"k": 3, "rounds": 1}
    calm = serve(make(**params), federation)
    served = serve(make(**params), federation, lost_in("contribute_blocks", 1, 5, times=7))
    assert torch.equal(models(served, make(**params)), models(calm, make(**params)))
    assert served.net.state.lost == {}
    # clients 3 and 5 train alone once, however often they are asked in a round
    assert served.endpoint.client.unshared == {3, 5}


# --- a server that lies ---


def lied_to(federation: Federation, lie: Lie) -> None:
    """Run a server that changes its requests for blocks."""
    made = make(rounds=1)
    endpoint = build_client(made, federation, DOUBLE)

    def answer(call: Call) -> Response:
        if call.method == "contribute_blocks":
            call = lie(call)
        return endpoint.answer(call)

    net = build_network(made, InProcess(answer), made.config(federation, "float64"))
    run_server(made, net)


def told(call: Call, **changes: Any) -> Call:
    return dataclasses.replace(call, query=dataclasses.replace(call.query, **changes))


def filled(*blocks: int) -> Shared:
    return Shared(torch.tensor(blocks))


def to_five(call: Call) -> Call:
    """The request without client 5, who was counted."""
    five = call.select(range(5))
    few = told(five, among="0-4", counted=5, filled=filled(1, 0), least=5)
    return dataclasses.replace(few, group=("0-4",) * 5, members=(5,) * 5)


LIES: dict[str, tuple[Lie, str]] = {
    "one may be lost": (lambda c: told(c, least=5), "single client"),
    "nobody may be lost, but fewer were counted": (
        lambda c: told(c, counted=5, least=5),
        "no list of its members",
    ),
    "counts of an earlier call": (lambda c: told(c, earlier=0), "did not take part"),
    "counts of a later call": (lambda c: told(c, earlier=c.step), "did not take part"),
    "others were counted": (to_five, "did not take part"),
    "members that were not": (
        lambda c: told(c, among="0-4", counted=5, least=5),
        "other clients than",
    ),
    "blocks of other models": (lambda c: told(c, filled=filled(1)), "of 2 blocks is told of 1"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_client_refuses_what_contradicts_what_it_knows(
    lie: str, federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 0, 0, 1, 1)
    lied_to(federation, lambda call: call)
    change, words = LIES[lie]
    with pytest.raises((PolicyError, FrameError), match=words):
        lied_to(federation, change)


@pytest.mark.parametrize("blocks", [(1, 1), (1, 0)])
def test_a_client_sends_blocks_once_for_a_choice(
    blocks: tuple[int, int], federation: Federation, choose: Callable[..., None]
) -> None:
    choose(0, 0, 0, 1, 1, 1)
    served = serve(make(rounds=1), federation)
    (position,) = [
        k for k, e in enumerate(served.transcript.entries) if e.method == "contribute_blocks"
    ]
    call, _ = served.transcript.content(position)
    made = make(rounds=1)
    endpoint = build_client(made, federation, DOUBLE)
    for k in range(position + 1):
        endpoint.answer(served.transcript.content(k)[0])
    endpoint.answer(call)  # the same frame again
    again = dataclasses.replace(call, step=call.step + 1)
    with pytest.raises(PolicyError, match="told something else of the same count"):
        endpoint.answer(told(again, filled=filled(*blocks)))


def test_a_client_reveals_nothing_where_one_is_called_lost(
    federation: Federation, choose: Callable[..., None]
) -> None:
    """The server chooses who drops out, after it knows the counts."""
    choose(0, 0, 0, 0, 1, 1)
    made = make(rounds=1)
    endpoint = build_client(made, federation, DOUBLE)
    asked = []

    def answer(call: Call) -> Response:
        if call.method == "reveal_shares" and call.query.purpose == "contribute_blocks":
            asked.append(call)
            lost = dataclasses.replace(
                call.query.lost, table=torch.tensor([0]), picks=((0,),) * len(call.to)
            )
            few = dataclasses.replace(call.query, lost=lost)
            call = dataclasses.replace(call, query=few).select(range(1, 6))
        return endpoint.answer(call)

    net = build_network(made, InProcess(answer), made.config(federation, "float64"))
    with pytest.raises(PolicyError, match="5 of 6 members survived, and 6"):
        run_server(made, net)
    assert asked


def test_a_server_that_invents_a_second_chooser_reads_a_block_of_one(
    federation: Federation, choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients cannot check: who else chose their model. The privacy report says so."""
    choose(0, 0, 1, 0, 0, 0)
    plain = serve(make(rounds=1, aggregation="plain"), federation)
    monkeypatch.setattr(hidden_server.counted_blocks, "counts_of", lambda counted: [3, 3])
    served = serve(make(rounds=1, exact_weights=True), federation)
    block = served.state.running.pending[1].posts[0].table
    update = plain.state.running.pending[1].posts[0].table
    torch.testing.assert_close(block, update, rtol=0, atol=1e-6)
    report = make().disclosures().server
    assert any("false counts" in line and "cannot check" in line for line in report)


@pytest.mark.parametrize("name", ["choose", "contribute", "join"])
def test_a_client_that_hides_its_choice_answers_no_call_that_would_tell_it(
    name: str, federation: Federation
) -> None:
    made = make(rounds=1)
    endpoint = build_client(made, federation, DOUBLE)
    open_run = serve(make(rounds=1, aggregation="plain"), federation)
    methods = [entry.method for entry in open_run.transcript.entries]
    source = methods.index("contribute" if name == "contribute" else "choose")
    call, _ = open_run.transcript.content(source)
    hidden = serve(made, federation).transcript.content(0)[0].config
    call = dataclasses.replace(call, method=name, config=hidden, verb=GATHER)
    with pytest.raises(PolicyError, match="hides choices"):
        endpoint.answer(call)
    if name == "contribute":
        with pytest.raises(PolicyError, match="other ways than sums"):
            endpoint.answer(dataclasses.replace(call, verb=SUM))


@pytest.mark.parametrize("name", ["count_choice", "receive_models", "join_unseen"])
def test_a_client_of_a_plain_run_answers_no_call_of_hidden_ones(
    name: str, federation: Federation
) -> None:
    made = make(rounds=1, aggregation="plain")
    endpoint = build_client(made, federation, DOUBLE)
    call, _ = serve(made, federation).transcript.content(0)
    verb = SUM if name == "count_choice" else GATHER
    members = (6,) * 6 if verb == SUM else (1,) * 6
    call = dataclasses.replace(call, method=name, verb=verb, members=members)
    with pytest.raises(PolicyError, match="sums are plain"):
        endpoint.answer(call)


def test_a_count_that_is_asked_for_again_is_of_the_same_choice(
    federation: Federation, choose: Callable[..., None]
) -> None:
    client: Any = build_client(make(), federation, DOUBLE).client
    state = make().begin(serve(make(rounds=1), federation).net)
    context = CallContext(tuple(range(6)), tuple(range(6)), 1, 1)
    found = []
    for choices in ((0, 0, 0, 1, 1, 1), (1, 1, 1, 0, 0, 0)):
        choose(*choices)
        found.append(client.count_choice(context, state.message_for(range(6))).count.values)
    assert torch.equal(found[0], found[1])
    later = dataclasses.replace(context, step=2)
    third = client.count_choice(later, state.message_for(range(6))).count.values
    assert torch.equal(third, 1 - found[0])


# --- whole runs ---


def test_a_run_folder_is_replayed_up_to_the_labels_that_the_server_never_learns(
    federation: Federation, tmp_path: Path, choose: Callable[..., None]
) -> None:
    choose(0, 1, 0, 1, 1, 0)
    fitted = make().fit(federation, FULL, folder=tmp_path)
    assert list(fitted.labels_) == [0, 1, 0, 1, 1, 0]
    assert list(fitted.state_.labels) == [0] * 6
    assert main(["replay", str(tmp_path)]) == 0


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_newcomers_choose_without_saying_what(mask: str, choose: Callable[..., None]) -> None:
    choose(0, 2, 0, 2, 2, 1, 0)
    fitted = make(mask=mask, k=3).fit(two_clusters(7, 30), FULL)
    assert list(fitted.labels_) == [0, 1, 0, 1, 1, 2, 0]
    choose(2, 0, 0, 2, 2, 0, 0, *[0, 2, 2, 1])  # newcomers are the clients 7 to 10
    fresh = two_clusters(4, 30, seed=1)
    labels = fitted.join(fresh)
    # nobody is offered the model that client 5 trained alone: newcomer 10 takes the better other
    assert list(labels[:3]) == [0, 1, 1] and labels[3] in (0, 1)
    assert fitted.joined_.ledger.events == []
    methods = {entry.method for entry in fitted.joined_.transcript.entries}
    assert "join_unseen" in methods and "join" not in methods


def test_only_counts_of_choices_and_sums_of_blocks_reach_the_server(federation: Federation) -> None:
    hidden = make().fit(federation, FULL)
    plain = make(aggregation="plain").fit(federation)
    uplink = hidden.bytes_["by_message"]["contribute_blocks"]["up"]
    single = plain.bytes_["by_message"]["contribute"]["up"]
    assert 1.5 < uplink / single < 2.5  # k = 2 blocks
    private = {event.method for event in hidden.ledger_.events}
    assert private == {"count_choice", "contribute_blocks"}
    section = privacy_section.section(hidden.result_)
    text = " ".join(section["server_view"])
    assert "sums over rounds" in text and "chose each model, exactly" in text
    assert any("count of count_choice of a single client" in line for line in section["unseen"])


def test_noise_is_refused_since_counts_have_none(federation: Federation) -> None:
    for noisy in ({"noise": 1.0}, {"target_epsilon": 4.0}, {"noise": 1.0, "dp_unit": "example"}):
        with pytest.raises(UsageError, match=r"counts: take noise 0, FL\+HC"):
            make(clip=1.0, **noisy).fit(federation)
