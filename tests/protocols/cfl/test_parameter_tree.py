"""The parameter tree: Algorithm 4 against a walk by hand, and what is kept at every split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation, LabelSwap
from securecluster.errors import UpdateError, UsageError
from securecluster.messaging.messages import Call, Picks, Rows
from securecluster.messaging.replies import Replies
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, Settings
from securecluster.protocols.cfl.client import PathModels
from securecluster.protocols.cfl.parameter_tree import ParameterTree, find_leaves
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.messages import ModelDelta, Update
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.run import Run
from securecluster.runtime.transport import Framed, InProcess

FULL = Settings(transcript="full", dtype="float64")
MASKS = ["none", "permutation", "rotation", cases.exhaustive("signed-permutation")]
# enough for three splits of `sides`, and a coarser test for clusters, which draws fewer nulls
BRIEF: dict[str, Any] = {"rounds": 14, "level": 0.01}


@pytest.fixture(scope="module")
def sides() -> tuple[Federation, Federation]:
    """Twenty clients of four clusters, and eight that come later."""
    whole = Federation.simulate("digits", clients=28, samples=50, seed=3)
    return whole.select(range(20)), whole.select(range(20, 28))


@pytest.fixture(scope="module")
def fitted(sides: tuple[Federation, Federation]) -> Callable[[str], CFL]:
    """The twenty clients' run under a mask, with a full transcript in float64; fitted once."""
    return functools.cache(lambda mask: CFL(mask=mask, **BRIEF).fit(sides[0], FULL))


def grown() -> ParameterTree:
    """Six clients: {0, 1, 2} | {3, 4, 5}, then {3} | {4, 5}, with updates along the axes of R^6."""
    tree = ParameterTree.start(6)
    for cluster, parts, new in ((0, ([0, 1, 2], [3, 4, 5]), 1), (1, ([3], [4, 5]), 2)):
        node = tree.branch(cluster, parts, new)
        node.updates = torch.eye(6, dtype=torch.float64)[node.members]
        node.model = ModelDelta(torch.zeros(6, dtype=torch.float64), 0)
    return tree


class Told:
    """A network on which every newcomer replies with the same vector at each node, and some are
    deaf for a while.
    """

    def __init__(self, vectors: dict[int, list[float]], deaf: int = 0) -> None:
        self.vectors, self.deaf, self.steps = vectors, deaf, list[int]()

    def gather(self, method: Any, query: Any, to: list[int], step: int | None = None) -> Any:
        self.steps.append(-1 if step is None else step)
        here = [] if self.deaf > 0 else to
        self.deaf -= 1
        rows = torch.tensor([self.vectors[i] for i in here], dtype=torch.float64)
        return Replies(tuple(here), Update(Rows(rows), None), tuple(set(to) - set(here)), 0)


def test_a_newcomer_follows_the_single_most_similar_update_and_ties_go_to_the_second_child() -> (
    None
):
    tree = grown()
    assert [node.cluster for node in tree.nodes] == [-1, 0, -1, 1, 2]
    assert tree.path(4) == [0, 2, 4]
    vectors = {
        10: [0, 1.0, 0, 0.9, 0.9, 0.9],  # one update decides, not their mean
        11: [0, 0, 0, 2.0, 1, 1],
        12: [0.5, 0, 0, 0, 0.5, 0],  # a tie
        13: [-1.0, -1, -1, -2, -3, -4],  # the least unlike
        14: [0.0] * 6,  # no direction: all ties
    }
    assert find_leaves(Told(vectors), tree, None, list(vectors)) == [0, 1, 2, 0, 2]  # type: ignore[arg-type]


def test_a_newcomer_that_does_not_reply_is_asked_again_and_then_named() -> None:
    assert find_leaves(Told({7: [1.0, 0, 0, 0, 0, 0]}, deaf=2), grown(), None, [7]) == [0]  # type: ignore[arg-type]
    with pytest.raises(UpdateError, match="7 do not reply"):
        find_leaves(Told({7: [1.0, 0, 0, 0, 0, 0]}, deaf=9), grown(), None, [7])  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", MASKS)
def test_every_node_keeps_the_model_and_the_updates_from_before_its_split(
    mask: str, sides: tuple[Federation, Federation], fitted: Callable[[str], CFL]
) -> None:
    """The unmasked run's transcript is the oracle: models add up from its means, and updates are
    those of the split's round.
    """
    plain, masked = fitted("none"), fitted(mask)
    assert [n.members for n in plain.tree_.nodes] == [n.members for n in masked.tree_.nodes]
    rounds = {}
    for position, entry in enumerate(plain.transcript_.entries):
        if entry.method == "train":
            call, answer = plain.transcript_.content(position)
            rounds[call.round] = (call.query, answer.reply.delta.values)
    start = build_client(plain, sides[0], FULL).client.cohort.start
    for v, node in enumerate(masked.tree_.nodes):
        if not node.children:
            continue
        query, delta = rounds[node.round]
        first = query.means.picks[node.members[0]]
        theta = start + query.means.table[first[0]] if first else start
        found = masked.node_model(v)
        torch.testing.assert_close(
            torch.cat([t.flatten() for t in found.values()]), theta, rtol=0, atol=1e-9
        )
        if mask == "none":
            torch.testing.assert_close(node.updates, delta[node.members], rtol=0, atol=0)
        else:
            inner = delta[node.members] @ delta[node.members].T
            torch.testing.assert_close(node.updates @ node.updates.T, inner, rtol=1e-7, atol=1e-9)
            assert not torch.equal(node.updates[:, : delta.shape[1]], delta[node.members])


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", MASKS)
def test_leaves_are_the_models_handed_out_and_ensembles_average_a_path(
    mask: str, sides: tuple[Federation, Federation], fitted: Callable[[str], CFL]
) -> None:
    run = fitted(mask)
    x = torch.as_tensor(sides[0].shards[0].x_test).double()
    for c, model in enumerate(run.models_):
        path = run.tree_.path(run.tree_.leaf(c))
        for name, value in run.node_model(path[-1]).items():
            torch.testing.assert_close(value, model[name], rtol=0, atol=1e-9)
        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        ).double()
        outputs = []
        for v in path:
            net.load_state_dict(
                dict(zip(net.state_dict(), run.node_model(v).values(), strict=True))
            )
            outputs.append(net(x).softmax(-1).detach())
        torch.testing.assert_close(
            run.ensemble(c, x), torch.stack(outputs).mean(0), rtol=0, atol=1e-9
        )
        assert len(path) > 1


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mask", "average"),
    [
        ("none", "uniform"),
        ("permutation", "uniform"),
        ("rotation", "uniform"),
        cases.exhaustive("signed-permutation", "uniform"),
        ("none", "weighted"),
        cases.exhaustive("permutation", "weighted"),
        ("rotation", "weighted"),
        cases.exhaustive("signed-permutation", "weighted"),
    ],
)
def test_newcomers_find_their_cluster_masked_as_well_as_plain(
    mask: str, average: str, sides: tuple[Federation, Federation], fitted: Callable[[str], CFL]
) -> None:
    old, new = sides
    weighted = CFL(mask=mask, average="weighted", **BRIEF)
    run = fitted(mask) if average == "uniform" else weighted.fit(old)
    assert run.agreement_ is not None
    assert run.agreement_["exact"]
    assert old.truth is not None
    truth = {int(label): old.truth[k] for k, label in enumerate(run.labels_)}
    before, events = (run.bytes_["up"], run.server_state_), list(run.ledger_.events)
    found = run.join(new)
    assert tuple(truth[int(c)] for c in found) == new.truth
    assert before == (run.bytes_["up"], run.server_state_)
    assert run.ledger_.events == events + run.joined_.ledger.events
    assert {e.method for e in run.joined_.ledger.events} == {"train"}
    assert run.joined_.bytes["up"] > 0
    assert list(run.join(new)) == list(found)  # every call starts from the end of the run


def test_newcomers_are_compared_by_gradients_where_the_clients_were(
    sides: tuple[Federation, Federation],
) -> None:
    fitted = CFL(similarity="gradient", rounds=14, level=0.05).fit(sides[0])
    assert len(set(fitted.labels_)) > 1
    fitted.join(sides[1])
    assert {e.method for e in fitted.joined_.ledger.events} == {"gradient"}


def test_the_gradient_is_the_full_one(sides: tuple[Federation, Federation]) -> None:
    """Against torch's own backward pass over all of a client's samples."""
    fitted = CFL(
        mask="none", similarity="gradient", criterion="absolute", eps1=1e9, eps2=1e9, rounds=1
    ).fit(sides[0], FULL)
    entry = next(k for k, e in enumerate(fitted.transcript_.entries) if e.method == "gradient")
    answer = fitted.transcript_.content(entry)[1]
    client = build_client(fitted, sides[0], FULL).client
    for i in (0, 7):
        net, shard = client.cohort.model.module.double(), sides[0].shards[i]
        net.zero_grad()
        torch.nn.functional.cross_entropy(
            net(torch.as_tensor(shard.x).double()), torch.as_tensor(shard.y)
        ).backward()
        expected = torch.cat([p.grad.flatten() for p in net.parameters()])
        torch.testing.assert_close(answer.reply.delta.values[i], -expected, rtol=0, atol=1e-12)


def test_a_run_without_a_tree_sends_less_and_places_nobody(
    sides: tuple[Federation, Federation], fitted: Callable[[str], CFL]
) -> None:
    small, whole = CFL(tree=False, **BRIEF).fit(sides[0], FULL), fitted(CFL().mask)
    assert list(small.labels_) == list(whole.labels_)
    assert "post" in whole.bytes_["by_message"]
    assert "post" not in small.bytes_["by_message"]
    assert sum(len(n.updates) for n in small.tree_.nodes) == 0
    with pytest.raises(UsageError, match="tree=True"):
        small.join(sides[1])
    with pytest.raises(UsageError, match="not kept"):
        small.node_model(0)


def test_a_split_waits_until_a_member_posts_the_model(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[Federation, Federation]
) -> None:
    from securecluster.messaging.transcript import Transcript
    from securecluster.runtime.transport import Recorded

    made = CFL(**BRIEF)
    first = next(line["round"] for line in made.fit(sides[0]).history_ if line["splits"])
    endpoint = build_client(made, sides[0], Settings())
    for deaf in (range(20), range(1)):
        transport = InProcess(
            endpoint.answer,
            lambda call, deaf=deaf: (
                set(deaf) if call.method == "post" and call.round == first else set()
            ),
        )
        net = build_network(
            made, Recorded(transport, Transcript("none")), made.config(sides[0], "float32")
        )
        run = Run(begin=lambda number, net=net: setattr(net, "round", number))
        endpoint = build_client(made, sides[0], Settings())
        transport._answer = endpoint.answer
        made.run_server(net, run)
        # one deaf member: the next one posts
        assert bool(run.history[first - 1]["splits"]) == (len(deaf) == 1)
        assert any(line["splits"] for line in run.history)


def test_a_split_that_hurt_is_undone_in_the_models_and_not_in_the_labels() -> None:
    """IID clients split by force have less data each: the root's model is better on samples that
    nobody trained on.
    """
    from securecluster import Iid

    federation = Federation.simulate("digits", scenario=Iid(), clients=8, samples=30, seed=1)
    forced: dict[str, Any] = {
        "criterion": "absolute", "eps1": 1e9, "eps2": 1e-9, "gamma_max": 0.0, "rounds": 12,
        "min_size": 8,
    }  # fmt: skip
    fitted = CFL(fallback=0.3, lr=0.5, **forced).fit(federation, Settings(dtype="float64"))
    fallback_models = fitted.state_.fallback_models
    assert len(set(fitted.labels_)) == 2
    for c, (node, losses) in enumerate(
        zip(fallback_models.nodes, fallback_models.losses, strict=True)
    ):
        own = fitted.tree_.leaf(c)
        if list(fitted.labels_).count(c) == 1:
            assert (node, losses) == (own, {})
            continue
        assert node == min(losses, key=losses.__getitem__)
        expected = fitted.node_model(node)
        for name, value in fitted.models_[c].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9)


def test_validation_losses_are_those_of_samples_that_nobody_trained_on() -> None:
    federation = cases.two_clusters(6, 40)
    fitted = CFL(
        fallback=0.25, criterion="absolute", eps1=1e9, eps2=1e-9, gamma_max=0.0, rounds=1
    ).fit(federation, Settings(dtype="float64"))
    client = build_client(fitted, federation, Settings(dtype="float64")).client
    cohort = client.cohort
    assert cohort.sizes == [30] * 6
    assert cohort.validation_sizes == [10] * 6
    for i, shard in enumerate(federation.shards):
        kept = {x.tobytes() for x in cohort._train_on.x[30 * i : 30 * i + 30].numpy()}
        away = {x.tobytes() for x in cohort._aside_on.x[10 * i : 10 * i + 10].numpy()}
        assert kept | away == {x.astype(np.float64).tobytes() for x in shard.x}
        assert not kept & away
    start = {n: t.double() for n, t in fitted.node_model(0).items()}
    for c, losses in enumerate(fitted.state_.fallback_models.losses):
        members = [i for i, label in enumerate(fitted.labels_) if label == c]
        if len(members) < 2:
            continue
        x, y = (
            torch.cat([part[10 * i : 10 * i + 10] for i in members])
            for part in (cohort._aside_on.x, cohort._aside_on.y)
        )
        logits = torch.func.functional_call(cohort.model.module, start, (x,))
        assert losses[0] == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-9
        )


def forced(
    federation: Federation, lost: Callable[[Call], set[int]], **params: Any
) -> tuple[CFL, Any, Endpoint[Any]]:
    """CFL that splits in round 1, the server's final state, and the clients."""
    made = CFL(
        criterion="absolute", eps1=1e9, eps2=1e-9, gamma_max=0.0, rounds=2, min_size=6, **params
    )
    endpoint = build_client(made, federation, Settings(dtype="float64"))
    net = build_network(made, InProcess(endpoint.answer, lost), made.config(federation, "float64"))
    return (
        made,
        made.run_server(net, Run(begin=lambda number: setattr(net, "round", number))),
        endpoint,
    )


def test_a_member_that_missed_the_last_average_does_not_post_it_as_its_clusters_model(
    small: Federation,
) -> None:
    def late(call: Call) -> set[int]:
        return {0} if call.method == "receive" else set()

    _, state, endpoint = forced(small, late)
    leaf = state.tree.nodes[state.tree.leaf(state.labels[0])]
    peer = next(i for i in leaf.members if i)
    mine, peers = (endpoint.client.models.row(i) for i in (0, peer))
    assert not torch.equal(mine, peers)
    torch.testing.assert_close(
        endpoint.client.model_at(leaf.model.displacement, leaf.model.step),
        peers,
        rtol=0,
        atol=1e-12,
    )


def test_a_member_that_missed_the_last_average_does_not_judge_its_cluster(
    small: Federation,
) -> None:
    asked: list[int] = []

    def late(call: Call) -> set[int]:
        asked.extend(call.to if call.method == "judge" else ())
        return {0} if call.method == "receive" else set()

    _, state, _ = forced(small, late, fallback=0.3)
    able = [
        i for i in range(1, 6) if sum(state.labels[k] == state.labels[i] for k in range(1, 6)) > 1
    ]
    assert asked == able


def test_clusters_at_unequal_depths_are_judged_over_real_frames_as_in_one_process() -> None:
    federation = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=3), clients=12, samples=40, seed=0
    )
    made = CFL(
        criterion="absolute", eps1=1e9, eps2=1e-9, gamma_max=0.0, rounds=4, min_size=5, fallback=0.3
    )
    config = made.config(federation, "float64")
    states = []
    for framed in (False, True):
        endpoint = build_client(made, federation, Settings(dtype="float64"))
        each = dict.fromkeys(range(12), endpoint.answer_frame)
        transport = (
            Framed(each, lambda name: call_types(made, name)[1])
            if framed
            else InProcess(endpoint.answer)
        )
        net = build_network(made, transport, config)
        states.append(
            made.run_server(net, Run(begin=lambda number, net=net: setattr(net, "round", number)))
        )  # type: ignore[misc]
    tree, judged = states[0].tree, [state.fallback_models.losses for state in states]
    assert len({len(tree.path(tree.leaf(c))) for c, losses in enumerate(judged[0]) if losses}) > 1
    assert [list(own) for own in judged[0]] == [list(own) for own in judged[1]]
    for one, other in zip(*judged, strict=True):
        assert list(one.values()) == pytest.approx(list(other.values()), rel=1e-9)


def test_full_gradients_are_those_of_the_whole_network_without_dropout(small: Federation) -> None:
    layers = [
        torch.nn.Flatten(),
        torch.nn.Linear(64, 8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(8, 10),
    ]
    net = torch.nn.Sequential(*layers)
    endpoint = build_client(CFL(model=net), small, Settings(dtype="float64"))
    found = endpoint.client.gradient(
        CallContext((2,), (2,), 1, 1), PendingUpdates.start(6, fresh=True).message_for([2])
    )
    plain, shard = net.double().eval(), small.shards[2]
    torch.nn.functional.cross_entropy(
        plain(torch.as_tensor(shard.x).double()), torch.as_tensor(shard.y)
    ).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(found.delta.values[0], -expected, rtol=0, atol=1e-12)


def test_a_loss_that_is_not_finite_is_a_bad_one(small: Federation) -> None:
    """Weights that overflow to NaN logits: without care their loss would count as 0, and be the
    best.
    """
    client = build_client(CFL(mask="none", model="linear", fallback=0.3), small, Settings()).client
    client.models = Rows(
        3e38 * torch.tensor([1.0, -1.0]).repeat(client.models.table.numel() // 2)[None], (0,) * 6
    )
    assert np.isposinf(client.cohort.validation_loss(client.models, range(6))).all()
    path = ((0,),) * 2
    steps, counts = (
        Picks(torch.zeros(1, dtype=torch.int64), path),
        Rows(torch.zeros(2, dtype=torch.int64)),
    )
    query = PathModels(
        Picks(torch.zeros_like(client.models.table), path), steps, True, counts, depth=1
    )
    found = client.judge(CallContext((0, 1), (0, 1), 1, 1), query).loss.values
    assert bool(found.isfinite().all())
    assert bool((found[:, 0] > 1e6 * found[:, 1]).all())


def test_a_checkpoint_holds_the_updates_of_splits_once(tmp_path: Path, small: Federation) -> None:
    params: dict[str, Any] = {
        "criterion": "absolute", "eps1": 1e9, "eps2": 1e-9, "gamma_max": 0.0, "rounds": 2,
        "min_size": 6,
    }  # fmt: skip
    kept = [
        CFL(tree=tree, **params).fit(small, folder=tmp_path / str(tree)).tree_
        for tree in (True, False)
    ]
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / str(tree)).glob("checkpoint-*/*"))
        for tree in (True, False)
    ]
    updates, model = 4 * kept[0].nodes[0].updates.numel(), 4 * kept[0].nodes[0].updates.shape[1]
    assert updates == 6 * model
    assert sizes[0] - sizes[1] < updates + 4 * model + 4096  # and the models of three nodes
