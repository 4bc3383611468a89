"""SR-FCA's clients, and the server's steps between two refinements."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.errors import PolicyError
from securecluster.messaging.messages import Call, Empty, Picks, Rows
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import SRFCA, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.messages import AverageDeltas
from securecluster.protocols.srfca.client import OfferedClusters, SRFCAClient
from securecluster.protocols.srfca.model_distance import (
    ClusterModels,
    CrossClusterLoss,
    WeightDistance,
    pairwise_l2,
)
from securecluster.protocols.srfca.server import (
    Graph,
    SRFCAState,
    average_trimmed,
    cluster_models,
    cross_losses,
    merge,
    recluster,
)
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.transport import InProcess

DOUBLE = Settings(dtype="float64")


def refiner(federation: Federation, **params: Any) -> SRFCAClient:
    """Clients in float64, each with a model of its own."""
    client: Any = build_client(
        SRFCA(**{"mask": "none", "model": "linear", **params}), federation, DOUBLE
    ).client
    noise = torch.from_numpy(
        np.random.default_rng(0).normal(size=(6, client.cohort.model.dimension))
    )
    client.models = Rows(client.cohort.start + noise, tuple(range(6)))
    found: SRFCAClient = client
    return found


def plain_loss(client: SRFCAClient, flat: torch.Tensor, k: int) -> float:
    """Where torch takes one client and one model."""
    module = copy.deepcopy(client.cohort.model.module).double()
    torch.nn.utils.vector_to_parameters(flat.clone(), module.parameters())
    o = client.cohort._offsets
    x, y = client.cohort._x[o[k] : o[k + 1]], client.cohort._y[o[k] : o[k + 1]]
    return float(torch.nn.functional.cross_entropy(module(x), y).detach())


def test_losses_of_several_models_are_torchs(small: Federation) -> None:
    client = refiner(small)
    models = client.models.values[[4, 1]]
    found = client.cohort.losses(models, [3, 0, 5])
    expected = [[plain_loss(client, model, k) for model in models] for k in (3, 0, 5)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert client.cohort.losses(models[:0], [3, 0]).shape == (2, 0)


@pytest.mark.parametrize(
    ("mask", "sealed"),
    [("none", False), ("rotation", False), ("haar", False), ("none", True), ("rotation", True)],
)
def test_cross_losses_are_those_of_every_model_on_everyones_samples(
    mask: str, sealed: bool, small: Federation
) -> None:
    made = SRFCA(mask=mask, sealed=sealed, model="linear")
    endpoint: Any = build_client(made, small, DOUBLE)
    client = endpoint.client
    client.models = refiner(small).models
    net = build_network(made, InProcess(endpoint.answer), made.config(small, "float64"))
    got = net.gather(SRFCAClient.send_model, Empty(), to=[0, 2, 3, 5])
    ids, found = cross_losses(net, got.ids, got.rows.delta.values, got.step)
    rows = [
        [plain_loss(client, client.models.row(j), i) for j in (0, 2, 3, 5)] for i in (0, 2, 3, 5)
    ]
    assert ids == (0, 2, 3, 5)
    np.testing.assert_allclose(found, (np.array(rows) + np.array(rows).T) / 2, rtol=1e-9)
    sums = net.sum(SRFCAClient.known_losses, Empty(), to=[0, 2, 3, 5], by=[1, 1, 0, 0])
    np.testing.assert_allclose(
        sums.rows.loss.table[:, [0, 2, 3, 5]], [np.sum(rows[2:], 0), np.sum(rows[:2], 0)], rtol=1e-9
    )
    assert sums.rows.loss.table[:, [1, 4]].abs().max() == 0
    if sealed:
        d = client.cohort.model.dimension
        assert got.rows.delta.values.dtype == torch.uint8
        assert got.rows.delta.values.shape == (4, 8 * made.pipeline({"dimension": d}).width(d) + 16)
        assert [
            (e.fields, e.seen) for e in net.state.ledger.events if e.method == "send_model"
        ] == [(("delta",), False)]


def letter(
    restart: int | None,
    rows: Sequence[torch.Tensor] = (),
    clients: int = 1,
    count: int | None = None,
) -> AverageDeltas:
    """Averages of step 0 for each client, the last of `count`."""
    table = torch.stack(list(rows)) if rows else torch.zeros(0, 0)
    picks = (tuple(range(len(rows))),) * clients
    counts = Rows(torch.full((clients,), len(rows) if count is None else count))
    return AverageDeltas(
        Picks(table, picks),
        Picks(torch.zeros(len(rows), dtype=torch.int64), picks),
        False,
        counts,
        restart,
    )


def test_a_restart_begins_at_the_first_weights_once(small: Federation) -> None:
    client = refiner(small)
    own, start = client.models.values.clone(), client.cohort.start
    one = torch.ones_like(start)
    client.receive(CallContext((1,), (1,), 1, 1), letter(1, [one]))
    torch.testing.assert_close(client.models.row(1), start + 1)
    # the next average of the same restart
    client.receive(CallContext((1,), (1,), 1, 2), letter(1, [one], count=2))
    torch.testing.assert_close(client.models.row(1), start + 2)
    # the first round: nothing to add yet
    client.receive(CallContext((1, 2), (1, 2), 1, 3), letter(2, clients=2))
    assert torch.equal(client.models.row(1), start) and torch.equal(client.models.row(2), start)
    assert torch.equal(client.models.values[[0, 3, 4, 5]], own[[0, 3, 4, 5]])
    other = refiner(small)
    other.restore(client.state(None))  # type: ignore[arg-type]
    other.receive(CallContext((1,), (1,), 1, 4), letter(2, [one]))
    torch.testing.assert_close(other.models.row(1), start + 1)


def test_a_model_stays_in_the_ball(small: Federation) -> None:
    client = refiner(small, radius=0.5)
    start = client.cohort.start
    far, near = torch.full_like(start, 3.0), torch.full_like(start, 1e-4)
    client.receive(CallContext((0,), (0,), 1, 1), letter(1, [far]))
    away = client.models.row(0) - start
    assert float(away.norm()) == pytest.approx(0.5) and float(away.std()) < 1e-12
    client.receive(CallContext((1,), (1,), 1, 2), letter(1, [near]))
    torch.testing.assert_close(client.models.row(1), start + near)


def test_one_step_of_the_gradient_variant_is_a_full_gradient(small: Federation) -> None:
    client = refiner(small, variant="gradient", lr=0.3, average="uniform")
    module = copy.deepcopy(client.cohort.model.module).double()
    torch.nn.utils.vector_to_parameters(client.models.row(2).clone(), module.parameters())
    o = client.cohort._offsets
    torch.nn.functional.cross_entropy(
        module(client.cohort._x[o[2] : o[3]]), client.cohort._y[o[2] : o[3]]
    ).backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    found = client.contribute(CallContext((2,), (2,), 1, 1), letter(None)).delta.values[0]
    torch.testing.assert_close(found, -0.3 * gradient, rtol=1e-9, atol=1e-12)


def test_without_trimming_updates_leave_in_sums_only_and_own_models_are_not_posted(
    small: Federation,
) -> None:
    made = SRFCA(mask="none", model="linear")
    endpoint, config = (
        build_client(made, small, Settings()),
        config_hash(made.config(small, "float32")),
    )
    query = PendingUpdates.start(6, fresh=False).message_for([0])
    for name, sent in (
        ("train", query),
        ("contribute", query),
        ("post", query),
        ("known_losses", Empty()),
        ("cluster_losses", Empty()),
        ("losses", query),
    ):
        with pytest.raises(PolicyError):
            endpoint.answer(Call(config, name, "gather", 1, 1, (0,), sent, (1,)))
    client: Any = endpoint.client
    client.receive(CallContext((0,), (0,), 1, 1), letter(1))
    # else a server could have a model of one client posted
    with pytest.raises(PolicyError, match="before the first average"):
        client.train_locally(CallContext((0,), (0,), 1, 2), query)
    made.set_params(trim=0.2)
    endpoint, config = (
        build_client(made, small, Settings()),
        config_hash(made.config(small, "float32")),
    )
    assert endpoint.answer(Call(config, "train", "gather", 1, 1, (0,), query, (1,))).ids == (0,)


def test_a_client_names_the_cluster_with_the_least_cross_loss(small: Federation) -> None:
    client = refiner(small)
    models = client.models.values[[3, 4, 5]] * 0.5
    fits = client.cohort.losses(models, [0, 1])
    nan, inf = np.nan, np.inf
    others = np.array([[fits[0, 1] + 9, fits[0, 0] - 9, 1e9], [nan, inf, nan]])
    picks = ((0, 1, 2), (0, 1, 2))
    query = OfferedClusters(
        Picks(models - client.cohort.start, picks), 0, Rows(torch.as_tensor(others))
    )
    context = CallContext((0, 1), (0, 1), 1, 1)
    expected = [
        int(np.argmin((others[0] + fits[0]) / 2)),
        min((0, 2), key=lambda c: float(fits[1, c])),
    ]
    assert client.choose(context, query).model.values.tolist() == expected
    again = OfferedClusters(
        Picks(models[:0], ((), ())), 0, Rows(torch.as_tensor([[inf, inf, 0.0], [0.0, inf, 1e9]]))
    )
    assert client.choose_again(context, again).model.values.tolist() == [2, 0]  # by what it keeps
    np.testing.assert_allclose(client.cluster_losses(context, Empty()).loss.values, fits)


@dataclasses.dataclass
class Told:
    """Distances of clients and clusters as given; silent clients say nothing."""

    away: Any
    apart: Any
    silent: tuple[int, ...] = ()
    asked: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)

    def nearest(self, who: Sequence[int], among: Sequence[int]) -> dict[int, int]:
        self.asked.append((list(who), list(among)))
        return {i: min(among, key=lambda c: self.away[i][c]) for i in who if i not in self.silent}

    def between(self, labels: Sequence[int]) -> Any:
        return np.asarray(self.apart, dtype=float)


def test_everyone_goes_to_the_nearest_cluster_and_a_lone_client_to_the_next() -> None:
    away = [[0, 5, 9], [0, 5, 9], [9, 0, 5], [9, 0, 5], [9, 5, 0]]
    told = Told(away, None)
    assert recluster(told, [0, 0, 1, 1, -1], 3) == [0, 0, 1, 1, 1]
    assert told.asked == [([0, 1, 2, 3, 4], [0, 1, 2]), ([4], [0, 1])]


def test_who_says_nothing_stays_or_joins_the_largest() -> None:
    away = [[0, 9]] * 3 + [[9, 0]] * 2 + [[9, 0]]
    assert recluster(Told(away, None, silent=(4, 5)), [0, 0, 0, 1, 1, -1], 2) == [0, 0, 0, 1, 1, 0]
    # two clusters of one: one remains
    assert recluster(Told([[0, 9], [9, 0]], None), [0, 1], 2) == [0, 0]
    assert recluster(Told([[0], [0]], None, silent=(0, 1)), [-1, -1], 1) == [0, 0]


def clusters(*values: float) -> ClusterModels:
    return ClusterModels(torch.tensor([[v, 2.0 * v] for v in values]), 7, list(range(len(values))))


def test_clusters_within_reach_are_merged_to_the_mean_of_their_models() -> None:
    apart = [[0, 9, 1, 9], [9, 0, 9, 9], [1, 9, 0, 9], [9, 9, 9, 0]]
    labels, table = merge(
        Told(None, apart), [3, 3, 2, 2, 2, 0, 0, 1, 1], clusters(1, 2, 3, 4), 1.0, 2
    )
    assert labels == [0, 0, 1, 1, 1, 1, 1, 2, 2]
    # unweighted: of 3 and 1
    torch.testing.assert_close(table, torch.tensor([[4.0, 8], [2, 4], [2, 4]]))


def test_a_cluster_nobody_took_does_not_merge_others() -> None:
    chain = [[0, 1, 9], [1, 0, 1], [9, 1, 0]]
    labels, table = merge(Told(None, chain), [0, 0, 2, 2], clusters(1, 2, 3), 1.0, 2)
    assert labels == [0, 0, 1, 1] and table[:, 0].tolist() == [1, 3]


def test_clients_of_dropped_components_take_the_nearest_that_is_left() -> None:
    away = [[0, 1, 2]] * 3 + [[9, 0, 4]] * 3 + [[3, 9, 0]] * 2
    apart = [[0, 9, 9], [9, 0, 9], [9, 9, 0]]
    told = Told(away, apart)
    labels, table = merge(told, [0, 0, 0, 1, 1, 1, 2, 2], clusters(1, 2, 3), 1.0, 3)
    assert labels == [0, 0, 0, 1, 1, 1, 0, 0] and table[:, 0].tolist() == [1, 2]
    silent = Told(away, apart, silent=(6,))
    assert merge(silent, [0, 0, 1, 1, 1, 1, 2, 2], clusters(1, 2, 3), 1.0, 3)[0] == [0] * 8
    everyone, mean = merge(Told(away, apart), [0, 0, 1, 1, 2, 2], clusters(1, 2, 6), 1.0, 4)
    assert everyone == [0] * 6 and mean[:, 0].tolist() == [3]


def test_distances_of_weights_and_what_scatter_adds() -> None:
    rows = torch.tensor([[0.0, 1], [0, -1], [4, 2], [4, -2]], dtype=torch.float64)
    models = ClusterModels(torch.tensor([[0.0, 0], [4, 0]], dtype=torch.float64), 0, [0, 1])
    plain, wide = (
        WeightDistance((0, 1, 2, 3), rows, models, scattered) for scattered in (False, True)
    )
    assert plain.nearest([3, 1, 9], [0, 1]) == {3: 1, 1: 0} and plain.nearest([3], [0]) == {3: 0}
    assert plain.between([0, 0, 1, 1])[0, 1] == pytest.approx(4)
    assert wide.between([0, 0, 1, 1])[0, 1] == pytest.approx(np.sqrt(16 + 1 + 4))


def test_clusters_are_compared_by_loss_as_two_of_their_clients_would_be(small: Federation) -> None:
    made = SRFCA(mask="none", model="linear")
    endpoint: Any = build_client(made, small, DOUBLE)
    client = endpoint.client
    client.models = refiner(small).models
    net = build_network(made, InProcess(endpoint.answer), made.config(small, "float64"))
    got = net.gather(SRFCAClient.send_model, Empty(), to=range(6))
    ids, alone = cross_losses(net, got.ids, got.rows.delta.values, got.step)
    labels = [0, 0, 0, 1, 1, 1]
    table = torch.stack(
        [client.models.values[own].mean(0) - client.cohort.start for own in ([0, 1, 2], [3, 4, 5])]
    )
    found = []
    for scattered in (None, alone):
        near = CrossClusterLoss(net, ids, ids, ClusterModels(table, 0, [0, 1]), labels, scattered)
        near.nearest(range(6), [0, 1])
        found.append(near.between(labels))
    losses = client.cohort.losses(table + client.cohort.start, list(range(6)))
    plain = np.array([losses[:3].mean(0), losses[3:].mean(0)])
    np.testing.assert_allclose(found[0], (plain + plain.T) / 2, rtol=1e-9)
    pairs = np.triu_indices(3, 1)
    apart = [alone[:3, :3][pairs].mean(), alone[3:, 3:][pairs].mean()]
    spread = np.maximum(np.array(apart) - np.diag(plain), 0)
    assert spread.min() > 0
    np.testing.assert_allclose(found[1], found[0] + (spread[:, None] + spread) / 2, rtol=1e-9)


def test_who_has_no_cluster_is_shown_as_one_of_its_own() -> None:
    state = SRFCAState([0, -1, 1, -1, 0], PendingUpdates.start(5, fresh=True))
    assert state.labels == [0, 2, 1, 3, 0]
    state.restart(fresh=True)
    state.outbox.post(1, torch.zeros(2, 3), state.clusters)
    assert state.outbox.restart == 1 and state.outbox.lagging_clients() == [0, 2, 4]
    state.restart(fresh=False)
    assert state.outbox.restart == 2 and not state.outbox.posts


def test_the_noise_in_clusters_models_is_taken_off_their_distances() -> None:
    """Noise of the expected length added at right angles: what is left are the distances without
    it.
    """
    rows, far = torch.zeros(4, 12, dtype=torch.float64), torch.zeros(2, 12, dtype=torch.float64)
    rows[:, 0], far[:, 0] = torch.tensor([0.0, 1, 9, 10]), torch.tensor([1.0, 9])
    for k in range(4):
        rows[k, 2 + k] = 5
    far[0, 6], far[1, 7] = 3, 6
    near = WeightDistance(
        (0, 1, 2, 3), rows, ClusterModels(far, 0, [0, 1], [9.0, 36.0]), True, 25.0
    )
    spread = [(1 + 0) / 2, (0 + 1) / 2]
    assert near.between([0, 0, 1, 1])[0, 1] == pytest.approx(np.sqrt(64 + sum(spread)))
    assert near.between([0, 0, 1, 1])[0, 0] == pytest.approx(np.sqrt(2 * spread[0]))
    middle = torch.zeros(1, 12, dtype=torch.float64)
    middle[0, 0] = 5.5  # nearer to the second cluster, whose model is blurred more
    assert WeightDistance((7,), middle, ClusterModels(far, 0, [0, 1], [9.0, 36.0]), False).nearest(
        [7], [0, 1]
    ) == {7: 1}
    assert WeightDistance((7,), middle, ClusterModels(far, 0, [0, 1]), False).nearest(
        [7], [0, 1]
    ) == {7: 0}


@pytest.mark.parametrize(
    ("placement", "trim"), [("local", 0.0), ("central", 0.0), ("central", 0.25)]
)
def test_the_noise_that_is_taken_off_clusters_models_is_theirs(
    placement: str, trim: float, small: Federation
) -> None:
    """Over 1,000s of coordinates the squared norm of what noise made of an average is what the
    server expects.
    """
    found = []
    for noise in (0.0, 1e-4):
        params = {
            "clip": 50.0, "noise": noise, "placement": placement, "trim": trim, "model": "mlp",
            "threshold": 1e6, "refine": 1,
        }  # fmt: skip
        # models that hardly move: noise changes no update
        made = SRFCA(mask="none", local_rounds=1, rounds=2, lr=1e-9, **params)
        endpoint = build_client(made, small, DOUBLE)
        net = build_network(made, InProcess(endpoint.answer), made.config(small, "float64"))
        net.agreed["placement"] = placement
        state = SRFCAState([0, 0, 0, 1, 1, 1], PendingUpdates.start(6, fresh=False))
        state.restart(fresh=False)
        for t in (1, 2):
            average_trimmed(net, state, 1.0, trim, t)
        found.append((cluster_models(net, state, None).table, state.noise))
    (plain, none), (noisy, told) = found
    assert none == [0.0, 0.0] and told[0] == told[1]
    assert (noisy - plain).square().sum(1).tolist() == pytest.approx(told, rel=0.1)


def test_the_noise_of_both_models_is_taken_off_their_squared_distance() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    expected = np.sqrt([[0, 25 - 8, 0], [25 - 8, 0, 18 - 8], [0, 18 - 8, 0]])
    np.testing.assert_allclose(pairwise_l2(rows, 4.0), expected, rtol=1e-6)
    assert pairwise_l2(rows, 0.0)[0, 1] == 5


@pytest.mark.parametrize("odd", [0, 1])
def test_theory_has_the_distances_within_and_across_first_clusters_beside_lambda(odd: int) -> None:
    distance = torch.tensor(
        [[9.0, 1, 4, 5, 7], [1, 9, 6, 4, 7], [4, 6, 9, 2, 7], [5, 4, 2, 9, 3], [7, 7, 7, 3, 9]]
    )
    graph = Graph([2, 3, 5, 7, 8], torch.zeros(4), 2.8, distance, [0, 0, 1, 1, 1], [4] * odd)
    entry = graph.theory()
    assert entry is not None
    assert (entry["within"], entry["across"]) == ((2.0, 4.0) if odd else (7.0, 4.0))
    assert ("every λ between them" in entry["sentence"]) == bool(odd)
    assert entry["aside"] == [8] * odd
    assert ("3 apart from all others: client 8" in entry["sentence"]) == bool(odd)
    assert dataclasses.replace(graph, labels=[0] * 5).theory() is None
