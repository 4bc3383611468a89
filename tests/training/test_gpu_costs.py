"""What a GPU would be asked to do, counted on the pretended device: launches a step, waits, and
bytes that go to main memory. Ceilings are the counts of today, so that none grows unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import Protocol
from pretended import NAME, PRETENDED, Costs, counted, pretending

from securecluster import Federation, protocols
from securecluster.core.randomness import Randomness
from securecluster.messaging import chunks
from securecluster.messaging.messages import Rows
from securecluster.models.validation import build
from securecluster.parties import endpoints, server_half
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.runs import carry_out
from securecluster.runtime.settings import Settings
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

FEW, MANY = 4, 40
D = 32 * (8 * 8 + 1) + 10 * 33  # of mlp-32
SAMPLES = 12


def federation(clients: int) -> Federation:
    draw = np.random.default_rng(0)

    def samples(count: int) -> tuple[Any, Any]:
        x = draw.random((count, 1, 8, 8)).astype(np.float32)
        return x, draw.integers(10, size=count)

    names = [f"c{k}" for k in range(clients)]
    return Federation.from_arrays(
        {name: samples(SAMPLES) for name in names},
        test={name: samples(3) for name in names},
        classes=10,
        seed=0,
    )


def test_the_counter_counts_launches_waits_and_bytes() -> None:
    with pretending():
        x = torch.arange(6.0).to(PRETENDED)
        with counted() as costs:
            y = (x.view(2, 3).T + 1).expand(3, 2)  # views launch nothing
            torch.empty(5, device=PRETENDED)
        assert dict(costs.launches) == {"add": 1}
        assert not (costs.waits or costs.uploads or costs.to_host)
        with counted() as costs:
            assert bool((y > 0).all()) and float(y[0, 0]) == 1
            assert y.cpu().shape == (3, 2) and len(x[x > 2]) == len((x > 2).nonzero()) == 3
        assert [name for name, _ in costs.waits.elements()].count("_local_scalar_dense") == 2
        assert sum(costs.waits.values()) == 5
        assert sum(costs.to_host.values()) == 1 + 4 + 24
        with counted() as costs:
            x += torch.ones(6).to(PRETENDED)
            x[torch.tensor([0, 1])] = 0.0
        assert (sum(costs.uploads.values()), costs.from_host) == (2, 24 + 16)
        assert dict(costs.launches) == {"add_": 1, "scalar_tensor": 1, "index_put_": 1}


PLAN = {"lr": 0.1, "epochs": 1, "batch_size": SAMPLES // 2}
PRIVATE = {**PLAN, "clip": 1.0}
TRAININGS: dict[str, tuple[dict[str, Any], int, int]] = {
    # options, launches a step, waits in all
    "sgd": (PLAN, 17, 0),
    "momentum": ({**PLAN, "momentum": 0.5}, 23, 0),
    "adam": ({**PLAN, "optimizer": "adam"}, 47, 0),
    "clipped": (PRIVATE, 41, 1),
    "noise": ({**PRIVATE, "noise": 1.0}, 50, 1),
}


def trained(options: dict[str, Any], clients: int, steps: int, one_start: bool = True) -> Costs:
    flat = build("mlp-32", (1, 8, 8), 10, Randomness(0))
    with pretending():
        secret = NoiseStreams(lambda client: bytes([client] * 32), "run")
        cohort = LocalTrainer(federation(clients), flat, Randomness(0), PRETENDED, secret=secret)
        if options.get("clip"):
            cohort._train_on.digest(0)  # once for a run
        starts = cohort.start[None] if one_start else cohort.start.repeat(clients, 1)
        rows = Rows(starts, (0,) * clients if one_start else None)
        plan = LocalTraining(**{**options, "steps": steps})
        with counted() as costs:
            updates = cohort.train(rows, range(clients), plan, 1, scale=[0.5] * clients)
        assert updates.shape == (clients, D) and updates.cpu().any()
    return costs


SETTLING = 3  # launches where float64 may have rounded a draw wrongly


def launches(costs: Costs) -> int:
    """Return the launches without those that settle draws, about one of a hundred thousand."""
    return sum(costs.launches.values()) - SETTLING * costs.launches["index_put_"]


@pytest.mark.few(4)
@pytest.mark.parametrize("one_start", [True, False])
@pytest.mark.parametrize("training", TRAININGS)
def test_launches_and_waits_of_training_do_not_depend_on_clients(
    training: str, one_start: bool
) -> None:
    options, ceiling, waits = TRAININGS[training]
    trained(options, 1, 1)  # makes what later trainings use again
    few, more, many = (
        trained(options, *size, one_start) for size in ((FEW, 2), (FEW, 6), (MANY, 6))
    )
    a_step = (launches(more) - launches(few)) / 4
    # batches of DP-SGD that are as wide as the widest are not copied
    assert ceiling - 1 <= a_step <= ceiling
    assert abs(launches(many) - launches(more)) <= (6 if "clip" in options else 0)
    noisy_steps = many.launches["gaussians"]
    assert noisy_steps == many.launches["nonzero"] == (6 if "noise" in options else 0)
    for costs in (more, many):
        settled = costs.launches["index_put_"]
        assert sum(costs.waits.values()) == waits + noisy_steps + settled
        assert sum(costs.uploads.values()) <= 8 + 3 * noisy_steps + settled
    models = (waits > 0) * (1 if one_start else MANY)
    settled = 40 * 64 * (noisy_steps > 0)
    assert 4 * D * models <= sum(many.to_host.values()) <= 4 * D * models + settled


RUNS: dict[str, tuple[Protocol, dict[str, Any], int, int, int, int]] = {
    # method, options, launches a round of two steps, waits a round beside those for noise, and
    # models that go to main memory: for each client, and once
    "plain": (protocols.FedAvg, {}, 71, 8, 0, 4),
    "masked": (protocols.CFL, {"mask": "permutation"}, 107, 15, 1, 4),
    "noise": (protocols.CFL, {"mask": "none", "clip": 1.0, "noise": 1.0}, 190, 21, 5, 5),
    "DP-SGD": (protocols.FedAvg, {"clip": 1.0, "noise": 1.0, "dp_unit": "example"}, 124, 12, 2, 6),
    "secure sums": (protocols.FedAvg, {"aggregation": "secagg"}, 59, 7, 1, 5),
}


def a_round(made: Callable[[int], Any], clients: int) -> tuple[int, int, int]:
    """Return launches, waits beside those for noise, and bytes to main memory of the third round.

    Args:
        made: a method with a number of rounds.
        clients: number of clients.
    """
    found = []
    for rounds in (2, 3):
        with counted() as costs:
            made(rounds).fit(federation(clients), Settings(transcript="none"))
        of_noise = [count for (_, line), count in costs.waits.items() if "device_noise" in line]
        waits = sum(costs.waits.values()) - sum(of_noise)
        found.append((launches(costs), waits, sum(costs.to_host.values())))
    before, after = found
    launched, waited, copied = (b - a for a, b in zip(before, after, strict=True))
    return launched, waited, copied


@pytest.mark.few(3)
@pytest.mark.parametrize("case", RUNS)
def test_a_round_costs_a_gpu_the_same_whatever_the_number_of_clients(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (carry_out, endpoints, server_half):
        monkeypatch.setattr(module, "choose_device", lambda name: PRETENDED)
    monkeypatch.setitem(chunks.CHUNK_BYTES, NAME, 1 << 28)
    method, options, launched, waited, each, once = RUNS[case]

    def made(rounds: int) -> Any:
        common = {"model": "mlp-32", "epochs": 1, "batch_size": SAMPLES // 2}
        return method(rounds=rounds, **common, **options)

    with pretending():
        few, many = a_round(made, FEW), a_round(made, 3 * FEW)
    # what a process makes once, and draws that are settled anew, are a few launches
    assert abs(few[0] - many[0]) <= 6
    assert abs(few[1] - many[1]) <= 1
    for costs, clients in ((few, FEW), (many, 3 * FEW)):
        # operations of our own count with their parts where a process made them before it counted
        assert costs[0] <= 1.5 * launched
        assert costs[1] <= 1.5 * waited
        models = each * clients + once
        assert 4 * D * (models - 1) <= costs[2] <= 4 * D * models + 200 * clients
