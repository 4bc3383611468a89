"""One-shot clustering from noisy Gram matrices: relevance against numpy, what is asked again,
prices, newcomers, resuming.
"""

from __future__ import annotations

import math
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation, Tasks
from securecluster.core.serialization import pack, unpack
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call, Empty, Response
from securecluster.messaging.parties import SERVER
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import OneShot, Settings
from securecluster.protocols.common.comparison import gram_mechanism
from securecluster.protocols.common.comparison.gram_mechanism import gram, packed
from securecluster.protocols.oneshot.client import OneShotClient
from securecluster.protocols.oneshot.server import eigenvectors_of_others
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.transport import InProcess

FULL = Settings(transcript="full")
MASKS = ("none", "permutation", "haar")


@pytest.fixture(scope="module")
def tasks() -> Federation:
    """Ten clients, digits 0–4 against 5–9, a tenth of their samples from the other task."""
    return Federation.simulate("digits", scenario=Tasks(), clients=10, samples=90, seed=0)


def noisy(
    federation: Federation, endpoint: Endpoint[Any], z: float, per_client: bool = False
) -> list[np.ndarray]:
    """Clients' noisy Gram matrices: sums of outer products of unit rows, and what is drawn for them
    in an orthonormal basis.
    """
    draws, found = NoiseStreams(endpoint.keys.noise, endpoint._config), []
    for i, shard in enumerate(federation.shards):
        x = shard.x.reshape(len(shard.y), -1).astype(np.float64)
        x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
        own = x.T @ x / (len(x) if per_client else 1)
        exact = packed(gram(torch.from_numpy(shard.x).flatten(1), per_client))
        row = (draws.noised(i, "gram", 0, exact, z, 1.0) - exact).numpy()
        upper = np.zeros((64, 64))
        # one number for each direction e_a e_aᵀ, and (e_a e_bᵀ + e_b e_aᵀ)/√2
        upper[np.triu_indices(64)] = row
        found.append(
            own + (np.diag(np.diag(upper)) + (np.triu(upper, 1) + np.triu(upper, 1).T) / np.sqrt(2))
        )
    return found


def spectrum(matrix: np.ndarray, p: int, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Leading eigenvalues and vectors, as far as they stand out of the noise."""
    values, vectors = np.linalg.eigh(matrix)
    values, vectors = values[::-1][:p], vectors[:, ::-1][:, :p]
    return values, vectors[:, : max(1, int((values >= 2 * z * np.sqrt(2 * len(matrix))).sum()))]


def row(matrix: np.ndarray, values: np.ndarray, vectors: np.ndarray) -> float:
    """Return r(i, j) of the span of vectors (D, q), by the q leading eigenvalues."""
    energy = np.linalg.norm(values[: vectors.shape[1]])
    seen = np.linalg.norm(matrix @ vectors)  # Frobenius
    return float(min(energy, seen) / max(energy, seen))


def served(made: OneShot, federation: Federation) -> tuple[Any, Endpoint[Any]]:
    state, endpoint, *_ = cases.serve(made, federation, settings=Settings())
    return state, endpoint


NOISES = [(0.1, "example", 4), (0.01, "client", 1), (40.0, "example", 1)]
HIDDEN = [(mask, sealed) for mask in MASKS for sealed in (True, False)]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("z", "unit", "counted", "mask", "sealed"),
    [
        (*noise, *hidden)
        if noise == NOISES[0] or hidden == ("permutation", True)
        else cases.exhaustive(*noise, *hidden)
        for noise in NOISES
        for hidden in HIDDEN
    ],
)
def test_relevance_is_made_of_the_noisy_matrix_alone(
    z: float, unit: str, counted: int, mask: str, sealed: bool, tasks: Federation
) -> None:
    state, endpoint = served(
        OneShot(rounds=1, mask=mask, sealed=sealed, gram_noise=z, dp_unit=unit, model="linear"),
        tasks,
    )
    matrices = noisy(tasks, endpoint, z, unit == "client")
    spectra = [spectrum(a, 5, z) for a in matrices]
    q = min(vectors.shape[1] for _, vectors in spectra)  # all pairs compare as many
    assert q == counted
    r = np.array(
        [
            [
                row(matrices[i], spectra[i][0], spectra[j][1][:, :q]) if i != j else 1
                for j in range(10)
            ]
            for i in range(10)
        ]
    )
    np.testing.assert_allclose(state.relevance.numpy(), (r + r.T) / 2, rtol=0, atol=1e-5)


def test_hardly_any_noise_is_none(tasks: Federation) -> None:
    def short(x: torch.Tensor) -> torch.Tensor:  # nothing to clip
        return x.flatten(1) / 10

    made = [
        OneShot(rounds=1, features=short, tasks=2, vectors=1, gram_noise=z) for z in (0.0, 1e-9)
    ]
    plain, noised = (one.fit(tasks) for one in made)
    assert torch.allclose(plain.state_.relevance, noised.state_.relevance, rtol=0, atol=1e-5)
    assert torch.equal(plain.client_models_.values, noised.client_models_.values)


def test_hardly_any_noise_leaves_the_energies_of_spans(tasks: Federation) -> None:
    state, _ = served(OneShot(rounds=1, gram_noise=1e-9, vectors=3, model="linear"), tasks)
    matrices = [direct(tasks, i) for i in range(10)]
    spectra = [spectrum(a, 3, 0.0) for a in matrices]
    r = np.eye(10)
    for i, j in np.argwhere(r == 0):
        r[i, j] = row(matrices[i], spectra[i][0], spectra[j][1])
    np.testing.assert_allclose(state.relevance.numpy(), (r + r.T) / 2, rtol=0, atol=1e-5)


def leaning(seed: int, angle: float = 0.3, n: int = 200) -> Federation:
    """Return three clusters of five clients whose leading directions differ by a small angle.

    The other seven eigenvalues are equal, so those eigenvectors are any basis of what is left.
    """
    draw = np.random.default_rng(seed)
    samples, truth = {}, {}
    for i in range(15):
        name, cluster = f"client {i:02d}", i // 5
        direction = np.eye(8)[0] * np.cos(angle) + np.eye(8)[1 + cluster] * np.sin(angle)
        sign = draw.choice([-1.0, 1.0], size=(n, 1))
        x = sign * direction + 0.25 * draw.normal(size=(n, 8))
        y = draw.integers(2, size=n)
        samples[name], truth[name] = (x.astype(np.float32), y), cluster
    test = {name: (x[:5], y[:5]) for name, (x, y) in samples.items()}
    return Federation.from_arrays(samples, test=test, truth=truth, classes=2, seed=seed)


@pytest.mark.few(1)
@pytest.mark.parametrize("p", [1, 2, 5])
def test_clusters_get_no_worse_with_less_noise(p: int) -> None:
    federation = leaning(1)
    for z in (3.73, 1.08, 0.33):  # ε = 1, 4 and 16 at δ = 1e-5
        fitted = OneShot(rounds=1, tasks=3, vectors=p, gram_noise=z, model="linear").fit(federation)
        assert fitted.agreement_ is not None
        assert fitted.agreement_["ari"] == 1


def test_more_noise_is_needed_to_lose_the_tasks_where_samples_are_projected(
    tasks: Federation,
) -> None:
    fitted = [
        OneShot(rounds=1, tasks=2, gram_noise=1.08, features=features).fit(tasks)
        for features in ("identity", "dct")
    ]
    # ε = 4 at δ = 1e-5
    assert all(one.agreement_ is not None and one.agreement_["exact"] for one in fitted)


class Curious:
    """A server that hands clients eigenvectors of its own making, and reads their rows."""

    def __init__(self, federation: Federation, z: float) -> None:
        self.made = OneShot(rounds=1, mask="none", sealed=False, gram_noise=z, vectors=1, tasks=2)
        self.endpoint = build_client(self.made, federation, Settings())
        self.net = build_network(
            self.made, InProcess(self._answer), self.made.config(federation, "float32")
        )
        self.rows: torch.Tensor | None = None

    def _answer(self, call: Call) -> Response:
        answer = self.endpoint.answer(call)
        self.rows = answer.reply.row.values.clone() if call.method == "relevance" else None
        return answer

    def ask(self, vector: np.ndarray) -> float:
        """r(0, 1) where client 1 is said to have sent `vector`."""
        table = torch.zeros(2, 1, 64)
        table[:, 0] = torch.from_numpy(vector).float()
        self.net.pairs(
            OneShotClient.relevance,
            eigenvectors_of_others([0, 1], table, self.net.state.step + 1, to=[0, 1]),
            to=[0, 1],
        )
        assert self.rows is not None
        return float(self.rows[0, 1])


def test_crafted_eigenvectors_are_answered_from_the_noisy_matrix_and_no_better_when_asked_again(
    tasks: Federation,
) -> None:
    z = 3.0
    server = Curious(tasks, z)
    matrix = noisy(tasks, server.endpoint, z)[0]
    exact = direct(tasks, 0)
    largest = np.linalg.eigvalsh(matrix)[-1]
    for a in (5, 20, 43):
        probe = np.zeros(64)
        probe[a] = 1
        told = [server.ask(probe) for _ in range(3)]
        assert told[0] == told[1] == told[2]  # so no mean over answers is nearer to the truth
        assert told[0] * largest == pytest.approx(np.linalg.norm(matrix @ probe), rel=1e-4)
        off = np.linalg.norm((matrix - exact) @ probe)
        # what is between it and the sample
        assert off == pytest.approx(z * np.sqrt(65 / 2), rel=0.35)


def direct(federation: Federation, i: int) -> np.ndarray:
    x = federation.shards[i].x.reshape(len(federation.shards[i].y), -1).astype(np.float64)
    x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    return np.asarray(x.T @ x)


def test_events_tell_what_each_reply_costs(tasks: Federation) -> None:
    def events(**params: Any) -> dict[str, tuple[str, float | None]]:
        fitted = OneShot(rounds=1, tasks=2, model="linear", **params).fit(tasks)
        return {
            e.fields[0]: (e.mechanism, e.noise_multiplier)
            for e in fitted.ledger_.events
            if e.fields
        }

    plain = events()
    assert plain["vectors"] == plain["row"] == ("exact", None)
    for sealed in (True, False):
        found = events(gram_noise=2.0, sealed=sealed)
        assert found["vectors"] == ("gaussian", 2.0) and found["row"] == ("free", None)
    naive = events(gram_noise=2.0, gram_mechanism="naive")
    assert naive["vectors"] == ("gaussian", 2.0) and naive["row"] == ("exact", None)
    fitted = OneShot(rounds=1, tasks=2, model="linear", gram_noise=2.0).fit(tasks)
    assert [e.replace for e in fitted.ledger_.events if e.fields == ("vectors",)] == [
        pytest.approx(math.sqrt(2))
    ]


def test_naive_noise_says_what_it_is_worth(tasks: Federation) -> None:
    fitted = OneShot(
        rounds=1,
        tasks=2,
        model="linear",
        gram_noise=0.05 / (2 * 5**0.5),
        gram_mechanism="naive",
        sealed=False,
    ).fit(tasks, FULL)
    (text,) = [line for line in fitted.disclosures().not_covered if "naive" in line]
    assert "std 0.05" in text and "released is infinite" in text
    alone = float(text.split("ε = ")[1].split()[0])
    assert alone == pytest.approx(4400, rel=0.01)  # at s = 0.05, p = 5, δ = 1e-5
    assert math.isinf(fitted.ledger_.epsilon)
    vectors = torch.cat(
        [
            s.content.vectors.values
            for s in fitted.transcript_.seen_by({SERVER})
            if s.method == "eigen" and s.receiver == SERVER
        ]
    )
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(10, 5))
    assert not [
        line for line in OneShot(gram_noise=1.0).disclosures().not_covered if "naive" in line
    ]


def test_numbers_of_samples_are_not_said_to_be_seen_where_they_are_not_told() -> None:
    assert any(
        "number of samples" in text for text in OneShot(clip=1.0, noise=1.0).disclosures().lps
    )
    assert not any(
        "number of samples" in text
        for text in OneShot(clip=1.0, noise=1.0, dp_unit="client").disclosures().lps
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("clusterer", ["average", "spectral", "kmeans"])
def test_other_clusterers_part_the_tasks_too(clusterer: str, tasks: Federation) -> None:
    for z in (0.0, 0.2):
        for count in (2, None):
            fitted = OneShot(
                rounds=1, tasks=count, model="linear", gram_noise=z, clusterer=clusterer
            ).fit(tasks)
            assert fitted.agreement_ is not None
            assert count is None or fitted.agreement_["exact"]
            config = fitted.kept_.learned.config
            assert config["clusterer"] == clusterer
            assert len(fitted.state_.linkage.merges) == 9


@pytest.mark.parametrize("mechanism", ["gram", "naive"])
def test_newcomers_choose_by_noisy_matrices_and_pay_for_one(mechanism: str) -> None:
    whole = Federation.simulate("digits", scenario=Tasks(), clients=14, samples=80, seed=2)
    z = 0.3 if mechanism == "gram" else 0.005
    fitted = OneShot(rounds=1, tasks=2, gram_noise=z, gram_mechanism=mechanism).fit(
        whole.select(range(10)), FULL
    )
    assert whole.truth is not None
    of = {int(c): whole.truth[i] for i, c in enumerate(fitted.labels_)}
    assert [of[int(c)] for c in fitted.join(whole.select(range(10, 14)))] == list(whole.truth[10:])
    (event,) = fitted.joined_.ledger.events
    expected = ("gaussian", z) if mechanism == "gram" else ("exact", None)
    assert (
        event.fields == ("cluster",)
        and (event.mechanism, event.noise_multiplier) == expected
        and event.ids == (10, 11, 12, 13)
    )


@pytest.mark.always
def test_a_target_is_reached_with_the_gram_matrix_in_it(tasks: Federation) -> None:
    fitted = OneShot(
        rounds=2, tasks=2, clip=1.0, target_epsilon=6.0, dp_unit="client", model="linear"
    ).fit(tasks)
    config = fitted.kept_.learned.config
    assert config["gram_noise"] == config["noise"] > 0
    assert 5.9 < fitted.ledger_.epsilon <= 6.0


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"gram_noise": -1.0}, "gram_noise = -1.0"),
        ({"gram_noise": float("nan")}, "gram_noise = nan"),
        ({"clusterer": "kmean"}, "did you mean 'kmeans'"),
        ({"clusterer": "kmeans", "height": 0.2}, "give tasks, or neither"),
        ({"gram_noise": "x"}, "gram_noise = 'x'"),
        ({"gram_mechanism": "grams"}, "did you mean 'gram'"),
        ({"gram_mechanism": "naive"}, "say how much"),
        ({"gram_mechanism": "naive", "target_epsilon": 1.0, "clip": 1.0}, "use the gram mechanism"),
        ({"gram_noise": 1.0, "target_epsilon": 1.0, "clip": 1.0}, "give one of them"),
    ],
)
def test_what_cannot_work_is_refused(params: dict[str, Any], word: str, tasks: Federation) -> None:
    with pytest.raises(UsageError, match=word):
        OneShot(rounds=1, **params).fit(tasks)


def test_what_features_are_made_of_is_told() -> None:
    pca = OneShot(gram_noise=1.0, features="pca", public="digits")
    assert any("principal components of digits" in text for text in pca.disclosures().not_covered)
    assert any(
        "features of your own" in text
        for text in OneShot(clip=1.0, target_epsilon=1.0, features=torch.nn.Flatten())
        .disclosures()
        .not_covered
    )
    assert (
        OneShot(gram_noise=1.0).disclosures().not_covered
        == OneShot(features="pca", public="digits").disclosures().not_covered
        == []
    )


def restarted(made: OneShot, federation: Federation, old: Endpoint[Any]) -> Endpoint[Any]:
    """Return a new process with the data of an old one, and what this packed."""
    new = build_client(made, federation, Settings())
    state = unpack(pack(old.client.state(old.keys.secrets)), ClientState)
    new.client.restore(state)
    new.keys.restore(state.secrets)
    return new


def asked(endpoint: Endpoint[Any], method: str) -> torch.Tensor:
    """Return what client 2 replies when it is sent unit vectors of clients 0 and 1."""
    context = endpoint.context((2,), 0, 1, method)
    if method == "eigen":
        told: torch.Tensor = endpoint.client.eigen(context, Empty()).vectors.values
        return told
    table = torch.zeros(2, 5, 64)
    table[0, :, 10:15] = table[1, :, 40:45] = torch.eye(5)
    if method == "relevance":
        row: torch.Tensor = endpoint.client.relevance(
            context, eigenvectors_of_others([0, 1], table, 1, [2])
        ).row.values
        return row
    cluster: torch.Tensor = endpoint.client.choose(
        context, eigenvectors_of_others([0, 1], table, 1, [2], [0, 1])
    ).cluster.values
    return cluster


METHODS = ("eigen", "relevance", "choose")  # a newcomer's first is the last


@pytest.mark.parametrize("first", METHODS)
@pytest.mark.parametrize("later", METHODS)
def test_a_matrix_that_a_restart_rounds_otherwise_is_refused_and_the_same_one_is_not(
    first: str, later: str, tasks: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = OneShot(rounds=1, tasks=2, mask="none", sealed=False, gram_noise=0.5, model="linear")
    old = build_client(made, tasks, Settings())
    asked(old, first)
    expected = asked(old, later)
    same = restarted(made, tasks, old)
    assert torch.equal(asked(same, later), expected)
    before = pack(same.client.memory())
    assert before == pack(old.client.memory())
    # a checkpoint of a version that kept the digests of some clients, with their positions
    memory = old.client.memory()
    made_at = torch.tensor([2])
    same.client.recall({**memory, "made": memory["made"][made_at], "made_at": made_at})
    assert before == pack(same.client.memory())

    exact = gram(torch.from_numpy(tasks.shards[2].x).flatten(1))
    monkeypatch.setattr(gram_mechanism, "BLOCK", 64 * 7)  # sums of few rows at a time
    other = gram(torch.from_numpy(tasks.shards[2].x).flatten(1))
    assert not torch.equal(other, exact)
    torch.testing.assert_close(other, exact, rtol=1e-13, atol=1e-13)
    moved = restarted(made, tasks, old)
    for _ in range(2):  # what was refused is not taken over
        with pytest.raises(PolicyError, match="client 2's noisy Gram matrix came out otherwise"):
            asked(moved, later)
    assert pack(moved.client.memory()) == before


@pytest.mark.parametrize("noise", [{}, {"gram_noise": 0.5, "gram_mechanism": "naive"}])
def test_nothing_is_remembered_where_there_is_no_noisy_matrix(
    noise: dict[str, Any], tasks: Federation
) -> None:
    made = OneShot(rounds=1, tasks=2, mask="none", sealed=False, model="linear", **noise)
    old = build_client(made, tasks, Settings())
    told = asked(old, "relevance")
    assert not old.client.memory()["made"].any()
    assert torch.equal(asked(restarted(made, tasks, old), "relevance"), told)
