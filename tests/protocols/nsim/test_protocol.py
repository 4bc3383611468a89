"""NSIM: clusters of users by a layer of their models, and what the server does before it asks
anyone.
"""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import PolicyError, UpdateError, UsageError
from securecluster.messaging.messages import Call, Empty, Rows
from securecluster.models.objectives import Trajectory
from securecluster.models.validation import build
from securecluster.parties.derived import initial_model, params_as_json
from securecluster.parties.endpoints import build_client
from securecluster.protocols import NSIM, Local, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.nsim.client import NSIMClient, find_layer
from securecluster.protocols.nsim.pair_network import PairNetworkConfig, pairwise
from securecluster.protocols.nsim.random_walks import Format, RandomWalk, windows
from securecluster.protocols.nsim.similarity_model import fit
from securecluster.protocols.nsim.synthetic_users import SyntheticUsersConfig, correlations
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import config_hash

FULL = Settings(transcript="full")
SMALL: dict[str, Any] = {
    "model": "mlp", "lr": 0.1, "epochs": 2, "synthetic": 24, "networks": 1, "positions": (40, 80),
    "local_rounds": 2, "rounds": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair network that trains for a moment."""
    trained_for(monkeypatch, steps=100)


def trained_for(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let the pair network train for so many steps."""
    brief = PairNetworkConfig(width=64, embedding=16, steps=steps, dropout=0.0)
    monkeypatch.setattr(
        "securecluster.protocols.nsim.synthetic_users.fit",
        lambda rows, true, draws, grid, networks: fit(rows, true, draws, True, (brief,), networks),
    )


def corner(number: int, draw: np.random.Generator) -> np.ndarray:
    """Positions that stay near one of two corners."""
    path = 0.15 + 0.7 * number + np.cumsum(draw.normal(size=(70, 2)), axis=0) / 400
    return np.asarray(path.clip(0, 1))


@pytest.fixture
def corners() -> Federation:
    """Eight users, every other one in the same corner."""
    draw = np.random.default_rng(0)
    users = {str(k): windows(corner(k % 2, draw), 10) for k in range(8)}
    truth = {str(k): k % 2 for k in range(8)}
    return Federation.from_arrays(
        users, truth=truth, objective=Trajectory(metres=(1000, 1000)), seed=0
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", ["hidden", "last"])
def test_users_of_the_same_places_share_a_cluster(
    layer: str, corners: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_for(monkeypatch, steps=300)
    fitted = NSIM(**SMALL | {"rounds": 3, "epochs": 10}, layer=layer).fit(corners, FULL)
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]
    line = fitted.history_[1]
    assert line["pearson_real"] > 0.8
    assert set(line) >= {
        "pearson", "pearson_pairs", "cka", "cka_real", "cca", "cca_real", "svcca", "svcca_real",
        "eps",
    }  # fmt: skip
    assert all("pearson_real" not in other for k, other in enumerate(fitted.history_) if k != 1)
    assert list(fitted.join(corners.select([1, 0, 3]))) == [
        fitted.labels_[1],
        fitted.labels_[0],
        fitted.labels_[3],
    ]


def test_similarities_are_the_mean_of_so_many_networks(corners: Federation) -> None:
    state = NSIM(**SMALL | {"networks": 2}).fit(corners).state_
    estimator = state.known.fitted.estimator
    assert len(estimator.networks) == 2
    standardised = ((state.layers - estimator.mean) / estimator.scale).clamp(-5, 5)
    by_network = [pairwise(network, standardised, standardised) for network in estimator.networks]
    apart = ~torch.eye(len(state.ids), dtype=torch.bool)
    expected = (by_network[0] + by_network[1]) / 2
    torch.testing.assert_close(state.similarity[apart], expected[apart])


def test_the_layer_comes_as_it_is_and_nothing_else_of_a_client(corners: Federation) -> None:
    fitted = NSIM(**SMALL, mask="permutation").fit(corners, FULL)
    alone = Local(**{k: SMALL[k] for k in ("model", "lr", "epochs", "rounds")}).fit(corners)
    names = [e.method for e in fitted.transcript_.entries if not e.method.startswith("key")]
    assert names == ["train_locally", "train_locally", "send_model", "pool", "receive"]
    reply = fitted.transcript_.content(
        [e.method for e in fitted.transcript_.entries].index("send_model")
    )[1].reply
    for k in range(8):
        state = alone.model_of(k)  # trained alone as long, from the same weights
        wanted = torch.cat([state["1.weight"].flatten(), state["1.bias"]])
        torch.testing.assert_close(reply.layer.values[k], wanted, rtol=0, atol=0)
    told = [
        ("send_model", "gather", ("layer",)),
        ("pool", "sum", ("delta",)),
        ("pool", "sum", ("size",)),
    ]
    assert [(e.method, e.verb, e.fields) for e in fitted.ledger_.events] == told


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_the_first_average_is_that_of_what_members_learned_alone(
    mask: str, corners: Federation
) -> None:
    fitted = NSIM(**SMALL, mask=mask, eps=0.5).fit(corners, Settings(dtype="float64"))
    alone = Local(**{k: SMALL[k] for k in ("model", "lr", "epochs", "rounds")}).fit(
        corners, Settings(dtype="float64")
    )
    models, sizes = (
        alone.client_models_.values.numpy(),
        np.array([len(s.y) for s in corners.shards]),
    )
    for c in set(fitted.labels_):
        own = fitted.labels_ == c
        wanted = (models[own] * sizes[own, None]).sum(0) / sizes[own].sum()
        for row in fitted.client_models_.values.numpy()[own]:
            np.testing.assert_allclose(row, wanted, rtol=0, atol=1e-12)


def test_noise_goes_on_alone(corners: Federation) -> None:
    fitted = NSIM(**SMALL | {"rounds": 4}, eps=0.0, min_samples=3, mask="none").fit(corners)
    alone = Local(**{k: SMALL[k] for k in ("model", "lr", "epochs")}, rounds=4).fit(corners)
    assert sorted(fitted.labels_) == list(range(8))
    assert {e.method for e in fitted.transcript_.entries} == {"train_locally", "send_model"}
    start = build_client(fitted.result_.method, corners, Settings()).client.cohort.start
    moved = [torch.linalg.norm(own.client_models_.values - start) for own in (fitted, alone)]
    assert abs(moved[0] / moved[1] - 1) < 0.2  # other batches, the same training


def test_synthetic_users_train_as_clients_do(corners: Federation) -> None:
    federation = Federation.simulate("digits", clients=4, samples=20, seed=5)
    users = [(s.x, s.y) for s in federation.shards]
    local = Local(model="mlp", lr=0.1, epochs=2, rounds=3)
    flat = initial_model(local, federation)
    plan = local.training.usual(local, {"lr": 0.1})
    for start in ("common", "independent"):
        made = SyntheticUsersConfig(8, RandomWalk(), Format(), 0.2, "last", start, 3, 1, 1)
        found = made.trained(users, flat, plan, federation.classes, "float32", federation.seed)
        if start == "common":
            # clients train one by one, and round otherwise
            torch.testing.assert_close(
                found, local.fit(federation).client_models_.values, rtol=0, atol=1e-6
            )
        else:
            assert len({tuple(row[:5].tolist()) for row in found}) == 4


def test_independent_users_start_apart_and_average_from_one_model(corners: Federation) -> None:
    made = NSIM(**SMALL | {"rounds": 3}, init="independent", eps=1.0)
    client: Any = build_client(made, corners, Settings()).client
    begun = client.models.values
    assert len({tuple(row[:5].tolist()) for row in begun}) == 8
    again: Any = build_client(made, corners, Settings(), [3]).client
    assert torch.equal(again.models.values[0], begun[3])
    fitted = made.fit(corners)
    assert set(fitted.labels_) == {0}
    assert len({tuple(row[:5].tolist()) for row in fitted.client_models_.values}) == 1
    assert (
        made.replay(made.fit(corners, FULL).transcript_, made.config(corners, "float32"))
        == fitted.server_state_
    )


def served(made: NSIM, federation: Federation, lost: Any) -> tuple[Any, Any]:
    state, endpoint, *_ = cases.serve(made, federation, lost, Settings())
    return state, endpoint.client


def test_who_hands_in_nothing_goes_on_alone(corners: Federation) -> None:
    made = NSIM(**SMALL | {"rounds": 3}, mask="none", eps=1.0)
    state, _ = served(made, corners, lambda call: {2} if call.method == "send_model" else set())
    assert state.ids == [0, 1, 3, 4, 5, 6, 7]
    assert state.labels == [0, 0, 1, 0, 0, 0, 0, 0]
    assert len(state.similarity) == 7
    state, _ = served(
        made, corners, lambda call: set(range(8)) if call.method == "send_model" else set()
    )
    assert state.labels == list(range(8))
    with pytest.raises(UsageError, match="no two clients sent a layer"):
        made.assign_newcomers(None, state, [8])  # type: ignore[arg-type]


def test_who_misses_the_average_starts_from_it_and_a_silent_cluster_goes_apart(
    corners: Federation,
) -> None:
    made = NSIM(**SMALL | {"rounds": 3}, mask="none", eps=1.0)
    state, client = served(made, corners, lambda call: {2} if call.method == "pool" else set())
    assert set(state.labels) == {0}
    assert torch.equal(client.models.values[2], client.models.values[0])
    state, client = served(
        made, corners, lambda call: set(range(8)) if call.method == "pool" else set()
    )
    assert state.labels == list(range(8))
    assert len({tuple(row[:5].tolist()) for row in client.models.values}) == 8


def test_clients_tell_of_their_own_model_only_before_the_first_average(corners: Federation) -> None:
    made = NSIM(**SMALL, eps=1.0, mask="none")
    _, endpoint, *_ = cases.serve(made, corners, settings=Settings())
    for method, verb in (("send_model", "gather"), ("pool", "sum")):
        call = Call(
            config_hash(made.config(corners, "float32")),
            method,
            verb,
            3,
            9,
            (0, 1),
            Empty(),
            (2, 2),
        )
        with pytest.raises(PolicyError, match="before the first average"):
            endpoint.answer(call)
    fresh = build_client(made, corners, Settings())
    with pytest.raises(PolicyError, match="through sum"):
        fresh.answer(
            Call(
                config_hash(made.config(corners, "float32")),
                "pool",
                "gather",
                1,
                1,
                (0,),
                Empty(),
                (1,),
            )
        )


def test_whoever_trains_alone_from_an_average_holds_no_model_of_its_own_any_more(
    corners: Federation,
) -> None:
    made = NSIM(**SMALL, mask="none")
    client: Any = build_client(made, corners, Settings(dtype="float64")).client
    client.train_locally(
        CallContext((0, 1), (0, 1), 1, 1), PendingUpdates.start(8, fresh=False).message_for([0, 1])
    )
    alone = client.models.row(1).clone()
    outbox = PendingUpdates.start(8, fresh=False)
    outbox.post(2, torch.ones(1, client.cohort.model.dimension, dtype=torch.float64), [0] * 8)
    updated = client.cohort.train(
        Rows(client.cohort.start[None] + 1, (0,)), [0], client.training, 3
    )
    client.train_locally(CallContext((0,), (0,), 2, 3), outbox.message_for([0]))
    assert torch.equal(client.models.row(0), client.cohort.start + 1 + updated[0])
    assert torch.equal(client.models.row(1), alone)
    with pytest.raises(PolicyError, match="before the first average"):
        client.send_model(CallContext((0,), (0,), 2, 4), Empty())
    client.send_model(CallContext((1,), (1,), 2, 4), Empty())


@pytest.mark.exhaustive
def test_the_estimator_is_replayed_with_the_threads_of_the_run(corners: Federation) -> None:
    threads = []

    def walks(form: Format, users: int, draw: np.random.Generator) -> list[Any]:
        threads.append(torch.get_num_threads())
        return RandomWalk()(form, users, draw)

    made = NSIM(**SMALL | {"synthetic": 8}, walks=walks)
    before = torch.get_num_threads()
    fitted = made.fit(corners, Settings(transcript="full", threads=before + 1))
    config = made.config(corners, "float32")
    with torch.inference_mode():
        assert made.replay(fitted.transcript_, config, before + 1) == fitted.server_state_
    assert threads == [before + 1] * 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"layer_mask": "permutation"}, "reads the weights themselves"),
        ({"layer": "first"}, "unknown layer"),
        ({"init": "same"}, "unknown init"),
        ({"walks": "levy"}, "walks = 'levy'"),
        ({"synthetic": 7}, "synthetic = 7"),
        ({"networks": 0}, "networks = 0"),
        ({"local_rounds": 0}, "local_rounds = 0"),
        ({"radius": -1}, "radius = -1"),
        ({"grid": 0}, "grid = 0"),
        ({"stride": 0}, "stride = 0"),
        ({"eps": np.nan}, "eps = nan"),
        ({"min_samples": 0}, "min_samples = 0"),
        ({"positions": (5, 20)}, "positions = "),
        ({"positions": (600, 150)}, "positions = "),
        ({"step": 0.0}, "step = 0.0"),
        ({"step": 1e-9}, "give 1e-05 to 1"),
        ({"step": 2.0}, "give 1e-05 to 1"),
        ({"model": "linear"}, "needs 2"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    wrong: dict[str, Any], told: str, corners: Federation
) -> None:
    with pytest.raises(UsageError, match=told):
        NSIM(**SMALL | wrong).fit(corners)


def test_other_data_need_a_generator_of_their_own(small: Federation) -> None:
    with pytest.raises(
        UsageError, match=r"not for the task classification.*data='mobility'.*generator of your own"
    ):
        NSIM().fit(small)

    def digits(form: Format, users: int, draw: np.random.Generator) -> list[Any]:
        """Users with one label more often than others."""
        return [
            (draw.random((20, *small.shape)).astype(np.float32), draw.integers(k % 10, 10, 20))
            for k in range(users)
        ]

    fitted = NSIM(model="mlp", rounds=2, local_rounds=1, synthetic=8, walks=digits, radius=0.0).fit(
        small
    )
    assert len(fitted.labels_) == 6
    assert params_as_json(fitted)["walks"] == {"own": "walks"}


@pytest.mark.parametrize(
    ("user", "told"),
    [
        ("abc", "no array of positions"),
        ([np.zeros((30, 10, 2)), np.zeros((30, 2))], "no array of positions"),
        ((np.zeros((30, 10, 2)), np.zeros((29, 2))), "one target per sample"),
        ((np.zeros((30, 9, 2)), np.zeros((30, 2))), r"shape \(9, 2\), and clients' have \(10, 2\)"),
        ((np.zeros((30, 10, 2)), np.zeros(30)), "trajectories are"),
        ((np.full((30, 10, 2), np.nan), np.zeros((30, 2))), "NaN"),
    ],
)
def test_generators_of_something_else_are_refused_in_a_sentence(
    user: Any, told: str, corners: Federation
) -> None:
    with pytest.raises(UsageError, match=told):
        NSIM(**SMALL | {"walks": lambda form, users, draw: [user] * users}).fit(corners)


def test_divergence_is_noticed_before_any_client_is_asked(corners: Federation) -> None:
    with pytest.raises(
        UpdateError, match="synthetic users are not finite: lower the learning rate"
    ):
        NSIM(**SMALL | {"lr": 1e30}).fit(corners)


def test_layers_are_found_by_their_place() -> None:
    flat = build("mlp", (8, 8), 10, Randomness(0))
    models = torch.arange(2.0 * flat.dimension).view(2, -1)
    views = flat.views(models)
    for which, name in (("hidden", "1"), ("last", "3")):
        layer = find_layer(flat, which)
        rows = layer.rows(models)
        assert torch.equal(
            rows, torch.cat([views[f"{name}.weight"].flatten(1), views[f"{name}.bias"]], 1)
        )
        np.testing.assert_array_equal(
            layer.weights(rows), views[f"{name}.weight"].transpose(1, 2).numpy()
        )
    with pytest.raises(UsageError, match="1 dense layer"):
        find_layer(build("linear", (8, 8), 10, Randomness(0)), "hidden")


def test_correlations_are_numpys_and_none_where_nothing_is_told() -> None:
    draw = np.random.default_rng(0)
    true = draw.random((6, 6))
    true = (true + true.T) / 2
    found = correlations(true**2, draw.normal(size=(6, 4, 4)), true, "_x")
    pairs = np.triu_indices(6, 1)
    assert found["pearson_x"] == pytest.approx(np.corrcoef(true[pairs] ** 2, true[pairs])[0, 1])
    assert found["cca_x"] is None
    assert found["cka_x"] is not None


def test_what_the_server_sees_is_said() -> None:
    assert any(
        "last hidden layer" in text and "in the clear" in text
        for text in NSIM().disclosures().server
    )
    assert any(
        text.startswith("each client's last layer")
        for text in NSIM(layer="last").disclosures().server
    )
    assert "much of the rest of that model, whatever the mask" in " ".join(
        NSIM().disclosures().server
    )
    assert "each client's first weights" in " ".join(NSIM(init="independent").disclosures().server)
    assert NSIMClient.send_model.__release__.through == ()  # type: ignore[attr-defined]
