"""Methods with several models, of which clients without a reply and newcomers take one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from cases import serve, two_clusters

from securecluster import CFLGP, CLoVE, Federation
from securecluster.messaging.messages import Call

# what the call is that tells clusters, and what the server reads in it, also with noise
METHODS = [
    (partial(CFLGP, k=2), "send_gradient", "inner products of the clients' gradients", "norms and"),
    (partial(CLoVE, k=2), "measure", "training losses under all models", "each client's training"),
]
SMALL: dict[str, Any] = {"epochs": 1, "model": "linear"}
EVERY = pytest.mark.parametrize(("method", "call", "read", "noisy"), METHODS)


@pytest.fixture(scope="module")
def clients() -> Federation:
    return two_clusters(14, 60)


@EVERY
def test_clients_that_never_reply_join_most_others(
    method: Any, call: str, read: str, noisy: str, clients: Federation
) -> None:
    def lost(asked: Call) -> set[int]:
        return {0, 3} if asked.method in (call, "receive_models") else set()

    made = method(mask="none", rounds=5, **SMALL)
    labels = serve(made, clients.select(range(10)), lost).state.labels
    replied = [label for i, label in enumerate(labels) if i not in (0, 3)]
    assert labels[0] == labels[3] == max(set(replied), key=replied.count)


@EVERY
def test_newcomers_take_the_model_of_lowest_loss(
    method: Any, call: str, read: str, noisy: str, clients: Federation
) -> None:
    run, newcomers = clients.select(range(10)), clients.select(range(10, 14))
    fitted = method(rounds=6, mask="rotation", **SMALL).fit(run)
    kinds = dict(zip(run.truth, fitted.labels_, strict=True))
    assert [*fitted.join(newcomers)] == [kinds[kind] for kind in newcomers.truth]


@EVERY
@pytest.mark.parametrize("unit", ["client", "example"])
def test_fewer_calls_that_tell_clusters_leave_more_of_a_target_to_training(
    unit: str, method: Any, call: str, read: str, noisy: str, clients: Federation
) -> None:
    private = {"clip": 1.0, "target_epsilon": 8.0, "dp_unit": unit, **SMALL}
    fitted, fewer = (
        method(rounds=4, cluster_rounds=rounds, **private).fit(clients) for rounds in (4, 1)
    )
    assert call in {event.method for event in fitted.ledger_.events}
    assert 0.95 * 8 < fitted.ledger_.price(1e-5).epsilon <= 8
    assert fewer.kept_.learned.config["noise"] < fitted.kept_.learned.config["noise"]


@EVERY
def test_what_the_server_sees_is_said_with_its_noise(
    method: Any, call: str, read: str, noisy: str
) -> None:
    def sentences(**params: Any) -> str:
        return " ".join(method(**params).disclosures().server)

    assert read in sentences() and "with noise" not in sentences()
    noised: dict[str, Any] = {"clip": 1.0, "noise": 1.0}
    assert f"with noise, {noisy}" in sentences(**noised)
    assert "number of samples" in sentences(**noised, dp_unit="example")
    assert "number of samples" not in sentences(**noised, dp_unit="client")
