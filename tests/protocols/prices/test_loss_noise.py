"""Noise on losses, choices and layers: what is drawn is priced, what is told again is the same, and
runs keep their properties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, NOISE, WAYS

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call, Empty, Picks, Rows
from securecluster.messaging.replies import Replies
from securecluster.parties.deployment import build_network
from securecluster.parties.dry_run import run_releases
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.gaussian_mechanism import TrustedCurator
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import CFL, Settings
from securecluster.protocols.cfl.client import PathModels
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.messages import Update
from securecluster.protocols.local_kmeans import LocalKMeansState
from securecluster.protocols.srfca.client import OfferedClusters, SRFCAClient
from securecluster.protocols.srfca.server import cross_losses
from securecluster.runtime.transport import InProcess

# a threshold may join nobody under noise
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")
Drawn = list[tuple[int, str, int, bytes]]


FEW: dict[str, dict[str, Any]] = {
    "srfca": {"refine": 2, "rounds": 1, "threshold": 0.5},
    "srfca trim": {"rounds": 1, "retrain": 1},
    "srfca sealed": {"rounds": 1},
    "srfca l2": {"rounds": 1},
    "ifca": {"rounds": 2},
    "nsim": {"rounds": 2},
    "nsim independent": {"rounds": 2, "eps": None},
    "local-kmeans": {"rounds": 2},
}
CASES = [(name, way) for name in FEW for way in WAYS if (name, way) != ("srfca sealed", "central")]
# Every variant, and each way where losses are chosen from, summed, or come with a layer
COVERED = [(name, "client") for name in FEW]
COVERED += [(name, "example") for name in ("srfca", "srfca sealed", "ifca", "nsim", "local-kmeans")]
COVERED += [(name, "central") for name in ("srfca", "srfca trim", "ifca", "nsim")]
SHARED = pytest.mark.parametrize(("name", "way"), cases.covering(CASES, COVERED), scope="module")


def method(name: str, way: str = "client", **params: Any) -> Any:
    """Return a protocol of few rounds with noise, under a permutation."""
    model = "mlp-32" if name.startswith("nsim") else "linear"
    own = {"mask": "permutation", "model": model, **NOISE, **WAYS[way]}
    return cases.variant(name, **{**own, **FEW[name], **params})


@contextmanager
def spying() -> Iterator[Drawn]:
    """Record what clients draw Gaussians for: (client, purpose, call, row)."""
    noised, draws_made = NoiseStreams.noised, Drawn()

    def remembered(
        draws: NoiseStreams, client: int, purpose: str, step: int, row: torch.Tensor, *rest: float
    ) -> torch.Tensor:
        draws_made.append((client, purpose, step, row.numpy().tobytes()))
        return noised(draws, client, purpose, step, row, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseStreams, "noised", remembered)
        yield draws_made


@pytest.fixture
def drawn() -> Iterator[Drawn]:
    """What clients draw Gaussians for during a test."""
    with spying() as draws_made:
        yield draws_made


@dataclass
class Noisy:
    """A noisy run in which everyone replies, and what clients drew in it."""

    made: Any
    fitted: Any
    drawn: Drawn


@pytest.fixture(scope="module")
def run(name: str, way: str, small: Federation) -> Noisy:
    """One noisy run of a protocol, which all `SHARED` tests read."""
    with spying() as draws_made:
        made = method(name, way)
        return Noisy(made, made.fit(small, FULL), draws_made)


def fresh() -> Federation:
    """Newcomers."""
    return cases.two_clusters(clients=2, samples=40, seed=1)


# the methods that draw, and the fields that the pipeline draws for
PURPOSES = ("losses", "choose", "join", "lowest_loss", "send_model", "delta")


@pytest.mark.few(8)
@SHARED
def test_whatever_is_drawn_is_an_event_and_the_price_is_finite(way: str, run: Noisy) -> None:
    fitted, drawn = run.fitted, run.drawn
    own = Counter(
        (i, purpose.split()[0])
        for i, purpose, _, _ in drawn
        if i >= 0 and purpose.split()[0] in PURPOSES
    )
    kinds = {
        "losses": ("loss", "losses"),
        "choose": ("model", "choose"),
        "lowest_loss": ("loss", "lowest_loss"),
        "send_model": ("layer", "send_model"),
    }
    told: Counter[tuple[int, str]] = Counter()
    for event in fitted.ledger_.events:
        if event.mechanism == "gaussian":
            (field,) = event.fields
            purpose = next(
                (p for p, known in kinds.items() if known == (field, event.method)), field
            )
            told.update((i, purpose) for i in event.ids)
    served = Counter(i for i, *_ in drawn if i == TrustedCurator.SERVER)
    assert bool(served) == (way == "central")
    central = {key: n for key, n in told.items() if way == "central" and key[1] == "delta"}
    assert dict(own) == {key: n for key, n in told.items() if key not in central}
    assert bool(told) or way == "example"
    assert 0 < fitted.ledger_.price(1e-5).epsilon < math.inf
    assert fitted.ledger_.exact() == []


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FEW)
def test_without_noise_the_price_is_infinite_and_clients_draw_nothing(
    name: str, small: Federation, drawn: Drawn
) -> None:
    for params in ({"clip": None, "noise": 0.0}, {"noise": 0.0}):
        fitted = method(name, **params).fit(small)
        assert math.isinf(fitted.ledger_.price(1e-5).epsilon) and not drawn


def counts(fitted: Any) -> tuple[int, int]:
    """Return how many noisy rows, and how many noisy trainings, a client releases at most."""
    rows, trainings = Counter[int](), Counter[int]()
    for event in fitted.ledger_.events:
        if event.mechanism == "gaussian":
            rows.update(event.ids)
        if event.mechanism == "dp-sgd":
            trainings.update(event.ids)
    return max(rows.values(), default=0), max(trainings.values(), default=0)


# rows of losses, updates or layers, and trainings of a client to which everyone replies
MOST: dict[str, tuple[int, int, int]] = {
    "srfca": (3, 3, 3), "srfca trim": (2, 3, 3), "srfca sealed": (2, 2, 2), "srfca l2": (0, 2, 2),
    "ifca": (5, 2, 2), "nsim": (0, 3, 2), "nsim independent": (0, 3, 2), "local-kmeans": (0, 2, 2),
}  # fmt: skip


def bounds(name: str, way: str) -> tuple[int, int]:
    """Return the upper bounds of `counts` from which `target_epsilon` is found."""
    losses, updates, trainings = MOST[name]
    return (losses, trainings) if way == "example" else (losses + updates, 0)


def foreseen(made: Any, federation: Federation) -> tuple[int, int]:
    """Return how many noisy rows, and how many noisy trainings, a run of stand-ins releases."""
    found: Counter[str] = Counter()
    for expense, count in run_releases(made, federation.facts, len(federation)).single:
        found[expense.mechanism] += count
    assert set(found) <= {"gaussian", "dp-sgd"}
    return found["gaussian"], found["dp-sgd"]


@pytest.mark.few(8)
@SHARED
def test_releases_reach_what_the_method_foresees_where_everyone_replies(
    name: str, way: str, run: Noisy, small: Federation
) -> None:
    rows, trainings = counts(run.fitted)
    most_rows, most_trainings = bounds(name, way)
    assert most_rows - 1 <= rows <= most_rows
    assert trainings == most_trainings
    assert foreseen(run.made, small) == (most_rows, most_trainings)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FEW)
def test_no_client_releases_more_than_its_method_foresees_under_dropouts(
    name: str, small: Federation
) -> None:
    made = method(name)
    most_rows, most_trainings = bounds(name, "client")
    rows, trainings = counts(made.fit(small, Settings(dropout=0.2)))
    assert rows <= most_rows
    assert trainings <= most_trainings
    assert foreseen(made, small) == (most_rows, most_trainings)


def normals(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape))


def ask(
    endpoint: Any, name: str, query: Any, to: tuple[int, ...], step: int, verb: str = "gather"
) -> Any:
    """What clients answer when they are asked directly."""
    members = {"gather": 1, "sum": len(to), "pairs": 2}[verb]
    call = Call(endpoint._config, name, verb, 1, step, to, query, (members,) * len(to))
    return endpoint.answer(call).reply


def test_the_layer_that_leaves_is_clipped_and_its_noise_is_gaussian(small: Federation) -> None:
    for init in ("common", "independent"):
        made = method("nsim", mask="none", noise=0.5, clip=0.02, init=init)
        endpoint: Any = build_client(made, small, DOUBLE)
        client = endpoint.client
        client.models = Rows(
            client.models.values + 0.01 * torch.arange(6)[:, None], tuple(range(6))
        )
        layer = client._layer
        began = (
            client.cohort.start[None]
            if init == "common"
            else torch.stack([client.cohort.drawn("client", i, "start") for i in range(6)])
        )
        moved = (layer.rows(client.models.values) - layer.rows(began)).numpy()
        norms = np.linalg.norm(moved, axis=1, keepdims=True)
        assert (norms > 0.02).sum() == 5  # the first client's has not moved
        clipped = moved / np.maximum(1, norms / 0.02)
        rest = [
            ask(endpoint, "send_model", Empty(), (0, 1, 2, 3, 4, 5), step).layer.values
            for step in range(1, 9)
        ]
        noise = np.stack([(rows - layer.rows(began)).numpy() - clipped for rows in rest]) / (
            0.02 * 0.5
        )
        assert abs(noise.mean()) < 5 / math.sqrt(noise.size) and abs(
            noise.var() - 1
        ) < 5 * math.sqrt(2 / noise.size)
        flat = noise.reshape(48, -1)
        apart = np.corrcoef(flat) - np.eye(48)
        assert np.abs(apart).max() < 6 / math.sqrt(flat.shape[1])


@pytest.mark.parametrize("unit", ["client", "example"])
def test_the_noise_of_losses_is_z_times_what_one_unit_can_change(
    unit: str, small: Federation
) -> None:
    made = method("srfca", mask="none", noise=0.3, loss_clip=2.0, dp_unit=unit)
    plain = build_client(made.set_params(noise=0.0, clip=None), small, DOUBLE)
    made.set_params(noise=0.3, clip=1.0)
    endpoint: Any = build_client(made, small, DOUBLE)
    d = plain.client.cohort.model.dimension
    models = normals(4, d)
    picks = ((0, 1, 2, 3),) * 6
    exact = plain.client.cohort.losses(endpoint.client.cohort.start + models, range(6), 2.0)
    query = OfferedClusters(
        Picks(models, picks), 0, Rows(torch.full((6, 4), math.nan, dtype=torch.float64))
    )
    found, everyone = [], tuple(range(6))
    for step in range(1, 61):
        chosen = ask(endpoint, "choose", query, everyone, step).model.values.tolist()
        rows = endpoint.client._cluster_losses
        assert chosen == [int(np.argmin(rows[k])) for k in range(6)]
        total = ask(
            endpoint, "cluster_losses", Empty(), everyone, step + 1000, "sum"
        ).loss.values.numpy()
        np.testing.assert_array_equal(total, [rows[k] for k in range(6)])
        found.append([rows[k] for k in range(6)])
    sizes = np.array(endpoint.client.cohort.sizes)[:, None] if unit == "example" else 1.0
    noise = (np.array(found) - exact) / (0.3 * 2.0 * math.sqrt(4) / sizes)
    assert abs(noise.mean()) < 5 / math.sqrt(noise.size) and abs(noise.var() - 1) < 5 * math.sqrt(
        2 / noise.size
    )
    assert np.abs(np.corrcoef(noise.reshape(60, -1).T) - np.eye(24)).max() < 0.65


def test_asked_the_same_again_a_client_says_the_same_and_asked_anew_it_draws_anew(
    small: Federation, drawn: Drawn
) -> None:
    made = method("ifca", mask="none", starts=1)
    endpoint: Any = build_client(made, small, DOUBLE)
    query = made.begin(type("Net", (), {"clients": range(6)})).message_for(range(6))
    told = [
        ask(endpoint, "lowest_loss", query, tuple(range(6)), step, "sum").loss.values
        for step in (1, 1, 2)
    ]
    assert torch.equal(told[0], told[1]) and not bool((told[0] == told[2]).any())
    assert drawn[:6] == drawn[6:12] != drawn[12:]
    # after a restart
    other = build_client(method("ifca", mask="none", starts=1), small, DOUBLE)
    assert torch.equal(
        ask(other, "lowest_loss", query, tuple(range(6)), 1, "sum").loss.values, told[0]
    )


def test_the_least_of_several_losses_needs_the_noise_of_one(small: Federation) -> None:
    """Unit example: B/n, times the n that is public; unit client: B, and no sizes."""
    for unit in ("example", "client"):
        made = method("ifca", mask="none", starts=1, k=5, noise=0.4, loss_clip=3.0, dp_unit=unit)
        endpoint: Any = build_client(made, small, DOUBLE)
        query = made.begin(type("Net", (), {"clients": range(6)})).message_for(range(6))
        told = [
            ask(endpoint, "lowest_loss", query, tuple(range(6)), step, "sum")
            for step in range(1, 21)
        ]
        assert (told[0].size is None) == (unit == "client")
        bank, sizes = (
            endpoint.client.model_sets[0],
            np.array(endpoint.client.cohort.sizes) if unit == "example" else 1,
        )
        exact = (
            np.stack([endpoint.client.cohort.loss(m.models, range(6), 3.0) for m in bank]).min(0)
            * sizes
        )
        noise = (np.stack([t.loss.values.numpy() for t in told]) - exact) / (0.4 * 3.0)
        assert abs(noise.mean()) < 5 / math.sqrt(noise.size) and abs(
            noise.var() - 1
        ) < 5 * math.sqrt(2 / noise.size)


def test_a_newcomer_that_compares_models_of_the_unit_client_blurs_its_own(
    small: Federation, drawn: Drawn
) -> None:
    for way, purposes, price in (("client", {"join"}, True), ("example", set[str](), False)):
        fitted = method("srfca l2", way, rounds=2).fit(small)
        drawn.clear()
        fitted.join(fresh())
        assert {purpose.split()[0] for _, purpose, *_ in drawn} & {"join"} == purposes
        kinds = {
            (e.method, e.mechanism) for e in fitted.joined_.ledger.events if not e.kept and e.fields
        }
        assert kinds == {("join", "gaussian" if price else "free")}
        assert 0 < fitted.joined_.ledger.price(1e-5).epsilon < math.inf


NEWCOMERS = [(name, way) for name in ("srfca", "ifca", "nsim", "local-kmeans") for way in WAYS]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        case if case[1] == "client" or case[0] == "ifca" else cases.exhaustive(*case)
        for case in NEWCOMERS
    ],
)
def test_what_newcomers_tell_is_priced(name: str, way: str, small: Federation) -> None:
    fitted = method(name, way).fit(small)
    fitted.join(fresh())
    assert (
        0 < fitted.joined_.ledger.price(1e-5).epsilon < math.inf
        and fitted.joined_.ledger.exact() == []
    )


def test_what_has_been_judged_is_told_again_without_new_noise_and_nothing_else_is(
    small: Federation,
) -> None:
    made = method("srfca", mask="none")
    endpoint: Any = build_client(made, small, DOUBLE)
    table = torch.zeros(2, endpoint.client.cohort.model.dimension, dtype=torch.float64)
    nobody = OfferedClusters(
        Picks(table, ((), ())), 0, Rows(torch.full((2, 2), math.nan, dtype=torch.float64))
    )
    for name, query, verb in (
        ("choose_again", nobody, "gather"),
        ("cluster_losses", Empty(), "sum"),
    ):
        with pytest.raises(PolicyError, match="choose comes first"):
            ask(endpoint, name, query, (0, 1), 1, verb)
    with pytest.raises(PolicyError, match="brings models to judge"):
        ask(endpoint, "choose", nobody, (0, 1), 2)
    with pytest.raises(PolicyError, match="brings no models"):
        models = OfferedClusters(Picks(table, ((0, 1),) * 2), 0, nobody.others)
        ask(endpoint, "choose_again", models, (0, 1), 3)


def test_what_the_server_sees_is_said_with_its_noise() -> None:
    for name in ("srfca", "srfca l2", "ifca", "local-kmeans"):
        assert any("with noise" in text for text in method(name).disclosures().server)
        assert not any(
            "with noise" in text for text in method(name, clip=None, noise=0.0).disclosures().server
        )
    for name in ("ifca", "nsim", "local-kmeans"):
        sizes = [
            any("number of samples" in text for text in method(name, way).disclosures().server)
            for way in ("client", "example")
        ]
        assert sizes == [False, True]
    layers = [method("nsim", way).disclosures().server[0] for way in ("client", "example")] + [
        method("nsim", clip=None, noise=0.0).disclosures().server[0]
    ]
    assert [
        "clipped and with noise" in layers[0],
        "training with noise" in layers[1],
        "in the clear" in layers[2],
    ] == [True] * 3


def test_newcomers_go_to_the_nearest_centre_whose_noise_is_known(small: Federation) -> None:
    """Local-KMeans: a mean of few noisy models is farther from everyone than one of many."""
    made = method("local-kmeans", mask="none")
    net: Any = build_network(
        made, InProcess(build_client(made, small, Settings()).answer), made.config(small, "float32")
    )
    d, blur = 650, net.noise("delta")
    assert blur == pytest.approx(0.7**2 * d, rel=3e-3)
    centres = torch.zeros(2, d)
    # of one member and of five, at 2 and 3 without noise
    centres[0, 0], centres[1, 1] = (math.sqrt(blur / 1 + 4), math.sqrt(blur / 5 + 9))
    labels = [0, 1, 1, 1, 1, 1]
    state = LocalKMeansState(labels, PendingUpdates.start(6, fresh=False), 1, centres)
    rows = Update(Rows(torch.zeros(1, d)), None)
    net.gather = lambda *args, **rest: Replies((6,), rows, (), 1)
    assert made.assign_newcomers(net, state, [6]) == [0]


def test_sealed_models_and_a_trusted_server_do_not_go_together(small: Federation) -> None:
    with pytest.raises(UsageError, match="cannot add noise to models that are sealed"):
        method("srfca sealed", "central").fit(small)


def relay(made: Any, small: Federation, endpoint: Any) -> Any:
    """What `losses` gets: everyone's one-shot model, in one call each."""
    net = build_network(made, InProcess(endpoint.answer), made.config(small, "float64"))
    got = net.gather(SRFCAClient.send_model, Empty(), to=net.clients)
    return net, got.rows.delta.values, got.step


@pytest.mark.few(1)
@pytest.mark.parametrize("unit", ["client", "example"])
def test_what_is_heard_of_one_shot_models_is_what_was_told_with_noise(
    unit: str, small: Federation
) -> None:
    made = method("srfca", mask="none", noise=0.3, clip=1e6, loss_clip=2.0, dp_unit=unit)
    endpoint: Any = build_client(made, small, DOUBLE)
    client, noise = endpoint.client, []
    client.models = Rows(
        client.cohort.start + normals(6, client.cohort.model.dimension), tuple(range(6))
    )
    client.displaced = lambda at: Update(Rows(client.models.values - client.cohort.start), None)
    net, rows, step = relay(made, small, endpoint)
    # each its own, too, as it was sent
    judged = client.cohort.losses(client.cohort.start + rows, range(6), 2.0)
    sizes = np.array(client.cohort.sizes)[:, None] if unit == "example" else 1.0
    for _ in range(40):
        ids, apart = cross_losses(net, tuple(range(6)), rows, step)
        told = client._model_losses.numpy().copy()
        np.testing.assert_array_equal(apart, (told + told.T) / 2)
        heard = net.sum(SRFCAClient.known_losses, Empty(), to=ids, by=[0, 1, 0, 1, 0, 1])
        np.testing.assert_allclose(
            heard.rows.loss.table.numpy(), [told[::2].sum(0), told[1::2].sum(0)], rtol=1e-12
        )
        noise.append((told - judged) / (0.3 * 2.0 * math.sqrt(6) / sizes))
    own = np.array(noise)
    assert abs(own.mean()) < 5 / math.sqrt(own.size) and abs(own.var() - 1) < 5 * math.sqrt(
        2 / own.size
    )
    costs = [
        (e.method, e.mechanism, e.noise_multiplier, e.replace)
        for e in net.state.ledger.events
        if e.method in ("losses", "known_losses")
    ]
    assert costs == [("losses", "gaussian", 0.3, 1.0), ("known_losses", "free", None, 1.0)] * 40


@pytest.mark.parametrize("unit", ["client", "example"])
def test_models_on_the_path_of_a_cluster_are_judged_with_noise(
    unit: str, small: Federation
) -> None:
    made = CFL(
        mask="none", model="linear", fallback=0.3, clip=1.0, noise=0.2, loss_clip=2.0, dp_unit=unit
    )
    endpoint: Any = build_client(made, small, DOUBLE)
    client = endpoint.client
    table, start = normals(2, client.cohort.model.dimension), client.cohort.start
    path = ((0, 1), (1,))
    query = PathModels(
        Picks(table, path),
        Picks(torch.zeros(2, dtype=torch.int64), path),
        True,
        Rows(torch.zeros(len(path))),
        depth=2,
    )
    exact = [
        client.cohort.validation_loss(Rows(m[None], (0, 0)), (3, 5), 2.0)
        for m in (start + table[0], start + table[1], start)
    ]
    wanted = np.array([[exact[2][0], exact[0][0], exact[1][0]], [exact[2][1], exact[1][1], 0]])
    told = [
        client.judge(endpoint.context((3, 5), 1, step, "judge"), query) for step in range(1, 101)
    ]
    found, n = np.stack([t.loss.values.numpy() for t in told]), 12 if unit == "example" else 1
    assert client.cohort.validation_sizes[3] == 12 and (told[0].size is None) == (unit == "client")
    assert unit == "client" or told[0].size.values.tolist() == [12, 12]
    assert not found[:, 1, 2].any()  # after the end of its path
    noise = (found - n * wanted) / (0.2 * 2.0 * np.sqrt([[3], [2]]))
    flat = np.concatenate([noise[:, 0].ravel(), noise[:, 1, :2].ravel()])
    assert abs(flat.mean()) < 5 / math.sqrt(flat.size) and abs(flat.var() - 1) < 5 * math.sqrt(
        2 / flat.size
    )


def test_a_cluster_whose_members_keep_their_numbers_falls_back_by_the_mean_of_their_means(
    small: Federation,
) -> None:
    made = CFL(
        criterion="absolute",
        eps1=1e9,
        eps2=1e-9,
        gamma_max=0.0,
        rounds=2,
        min_size=6,
        fallback=0.3,
        clip=9.0,
        noise=1e-9,
    )
    made.set_params(loss_clip=50.0, mask="none", model="linear")
    fitted = made.fit(small, Settings(dtype="float64", transcript="full"))
    (judged,) = [
        fitted.transcript_.content(n)[1].reply
        for n, e in enumerate(fitted.transcript_.entries)
        if e.method == "judge"
    ]
    assert judged.size is None
    cohort = build_client(made, small, DOUBLE).client.cohort
    for c, losses in enumerate(fitted.state_.fallback_models.losses):
        members = [i for i, label in enumerate(fitted.labels_) if label == c]
        means = cohort.validation_loss(Rows(cohort.start[None], (0,) * len(members)), members)
        assert not losses or losses[0] == pytest.approx(means.mean(), rel=1e-5)
    assert any(fitted.state_.fallback_models.losses)
