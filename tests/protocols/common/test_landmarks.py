"""Landmarks: the same run where all clients are landmarks, and bytes that are linear otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from securecluster import Federation
from securecluster.clustering.pairs import VARIABLE
from securecluster.errors import UsageError
from securecluster.protocols import CFL, FLHC, SRFCA, OneShot

CLIENTS = 32
LANDMARKS = 10
PLAN: dict[str, Any] = {"model": "linear", "epochs": 1, "batch_size": 4}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (FLHC, {"rounds": 2, "pre_rounds": 1}),
    (CFL, {"rounds": 5}),
    (CFL, {"rounds": 5, "sketch": 8}),
    (OneShot, {"rounds": 1, "tasks": 2, "vectors": 2}),
    (SRFCA, {"rounds": 1, "local_rounds": 1}),
    (SRFCA, {"rounds": 1, "local_rounds": 1, "distance": "l2"}),
]


def two_tasks(clients: int) -> Federation:
    """Clients whose data vary along one of two features, with opposite labels."""
    draw = np.random.default_rng(0)
    train = {}
    for k in range(clients):
        x = draw.standard_normal((8, 4)).astype(np.float32)
        x[:, k % 2] *= 4
        y = (x.sum(1) > 0) ^ bool(k % 2)
        train[f"c{k}"] = (x, y.astype(np.int64))
    return Federation.from_arrays(train, test=train, seed=0)


@pytest.fixture(scope="module")
def many() -> Federation:
    return two_tasks(CLIENTS)


@pytest.mark.parametrize(("made", "options"), CASES)
def test_when_all_are_landmarks_nothing_changes(
    made: Any, options: dict[str, Any], many: Federation
) -> None:
    usual = made(**PLAN, **options).fit(many)
    compared = made(**PLAN, **options, landmarks=CLIENTS).fit(many)
    assert list(compared.labels_) == list(usual.labels_)
    assert compared.bytes_ == usual.bytes_
    np.testing.assert_array_equal(compared.scores_, usual.scores_)


@pytest.mark.parametrize(("made", "options"), CASES)
def test_landmarks_find_the_clusters_of_all(
    made: Any, options: dict[str, Any], many: Federation
) -> None:
    truth = [k % 2 for k in range(CLIENTS)]
    fitted = made(**PLAN, **options, landmarks=LANDMARKS).fit(many)
    assert adjusted_rand_score(truth, fitted.labels_) > 0.6


@pytest.mark.parametrize(
    ("made", "options", "relay"),
    [(OneShot, CASES[3][1], "relevance"), (SRFCA, CASES[4][1], "losses")],
)
def test_what_is_relayed_among_landmarks_does_not_grow_with_the_clients(
    made: Any, options: dict[str, Any], relay: str
) -> None:
    sent = []
    for clients in (16, 64):
        fitted = made(**PLAN, **options, landmarks=LANDMARKS).fit(two_tasks(clients))
        sent.append(fitted.bytes_["by_message"][relay]["down"])
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_others_in_one_shot_send_a_cluster_and_no_eigenvectors(many: Federation) -> None:
    made = OneShot(**PLAN, rounds=1, tasks=2, vectors=2, landmarks=LANDMARKS)
    fitted = made.fit(many)
    senders: dict[str, set[int]] = {"eigen": set(), "choose": set()}
    for entry in fitted.transcript_.entries:
        if entry.method in senders:
            senders[entry.method].update(entry.to)
    assert len(senders["eigen"]) == LANDMARKS
    assert senders["choose"] == set(range(CLIENTS)) - senders["eigen"]


@pytest.mark.parametrize("made", [FLHC, CFL, OneShot, SRFCA])
@pytest.mark.parametrize("landmarks", [3, 2.5, True])
def test_landmarks_that_cannot_form_two_clusters_are_refused(
    made: Any, landmarks: Any, many: Federation
) -> None:
    with pytest.raises(UsageError, match="landmarks"):
        made(landmarks=landmarks).fit(many)


@pytest.mark.parametrize(("made", "options"), CASES)
def test_too_many_clients_to_compare_are_refused_before_they_train(
    made: Any, options: dict[str, Any], many: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(CLIENTS - 1))
    lines: list[Any] = []
    with pytest.raises(UsageError, match=f"pairs of {CLIENTS} clients .* let a sample of them"):
        made(**PLAN, **options).fit(many, report=lines.append)
    assert not lines
    sampled = made(**PLAN, **options, landmarks=LANDMARKS)
    if made is SRFCA:  # whose clients keep a row of losses of all models
        with pytest.raises(UsageError, match=f"pairs of {CLIENTS} clients .*: set {VARIABLE}"):
            sampled.fit(many)
    else:
        sampled.fit(many, report=lines.append)
        assert lines
    monkeypatch.setenv(VARIABLE, str(CLIENTS))
    made(**PLAN, **options).fit(many)
