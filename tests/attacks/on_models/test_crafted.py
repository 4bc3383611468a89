"""A server that sends a crafted model reads records; thresholds say which ones it must read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, samples_of, scene

from securecluster import Federation
from securecluster.attacks.base import Knowledge
from securecluster.attacks.experiments import with_server
from securecluster.attacks.on_models.crafted import CraftedModel, crafted_model, isolated
from securecluster.attacks.scoring import Score, evaluate
from securecluster.audits.run_audit import adversary_of, finding_of
from securecluster.protocols import CFL, FedAvg

RESAMPLES = (50, 50)
OPTIONS: dict[str, Any] = {
    "rounds": 1, "epochs": 1, "batch_size": 100, "model": "mlp", "mask": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=4, samples=20)


def attacked(federation: Federation, kind: Any = FedAvg, **options: Any) -> tuple[Any, Knowledge]:
    protocol = kind(**{**OPTIONS, **options})
    fitted = protocol.fit(federation, FULL)
    view, knowledge, truth = scene(fitted, federation, samples_of(federation, part="_test"))
    attack = CraftedModel(lambda server: with_server(protocol, federation, server, FULL))
    return evaluate(attack, view, knowledge, truth), knowledge


def alone(knowledge: Knowledge, records: Any) -> float:
    """Return the share of records that are alone between two thresholds, by a histogram."""
    parameters = knowledge.parameters(crafted_model(knowledge))
    weights, biases = (part.double().numpy() for part in list(parameters.values())[:2])
    along = records.reshape(len(records), -1) @ weights[0]
    edges = np.append(-biases, np.inf)
    counts, _ = np.histogram(along, edges)
    return float((counts == 1).sum() / len(records))


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}])
def test_a_secure_sum_shows_the_records_that_are_alone_between_two_thresholds(
    federation: Federation, options: dict[str, Any]
) -> None:
    score, knowledge = attacked(federation, aggregation="secagg", **options)
    expected = alone(knowledge, samples_of(federation)[0])
    assert expected > 0.2
    assert score.value == pytest.approx(expected, abs=0.06)
    assert score.beats_chance and score.chance == 0


@pytest.mark.parametrize("kind", [FedAvg, CFL])
def test_single_updates_show_more(federation: Federation, kind: Any) -> None:
    score, knowledge = attacked(federation, kind)
    shares = [alone(knowledge, np.asarray(shard.x)) for shard in federation.shards]
    assert score.value == pytest.approx(np.mean(shares), abs=0.06)


def test_noise_hides_the_records(federation: Federation) -> None:
    score, _ = attacked(federation, clip=1.0, noise=1.0)
    assert (score.value, score.at_chance) == (0, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"mask": "permutation"}, "undo a mask"), ({"model": "linear"}, "no perceptron")],
)
def test_what_the_server_cannot_craft_is_said(
    federation: Federation, options: dict[str, Any], reason: str
) -> None:
    said, _ = attacked(federation, **options)
    assert not isinstance(said, Score) and reason in said


def test_a_record_alone_in_a_gap_is_solved_by_hand() -> None:
    shapes = {"a": (2, 2), "b": (2,), "c": (2, 2), "d": (2,)}
    network = SimpleNamespace(shapes=shapes)
    two: Any = SimpleNamespace(config={"shape": (2,)}, classes=2, has_labels=True, network=network)
    # unit 0 is active for (1, 2) and (3, 5), and unit 1 for (3, 5) alone, each with gradient 1
    update = np.array([4.0, 7.0, 3.0, 5.0, 2.0, 1.0, 0, 0, 0, 0, 0, 0])
    found = [row.tolist() for row in isolated(update, two)]
    assert found == [[1.0, 2.0], [3.0, 5.0]]


def test_an_audit_lets_a_server_alone_send_models(federation: Federation) -> None:
    fitted = FedAvg(**OPTIONS, aggregation="secagg").fit(federation, FULL)
    server = adversary_of(federation.names, "server")
    found = finding_of(CraftedModel(), fitted, federation, server)
    assert found.score is not None and found.score.beats_chance, found.trace
    other = adversary_of(federation.names, "client:#1")
    assert "only observed" in finding_of(CraftedModel(), fitted, federation, other).reason
