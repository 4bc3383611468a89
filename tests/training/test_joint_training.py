"""Runs that train together, against each run alone, whose training has an oracle of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models import validation
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.training.joint_training import Request, current, in_threads
from securecluster.training.local_trainer import LocalTrainer, LocalTraining
from securecluster.training.stacked_runs import StackedRuns

PLAN = LocalTraining(0.3, 2, 10)
SECRET = NoiseStreams(lambda client: bytes([client] * 32), "run")


def cohort(seed: int, sizes: Sequence[int] = (25, 3, 11), network: str = "linear") -> LocalTrainer:
    """Return clients of one run; in a thread of joint training they take part in it."""
    draw = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for k, size in enumerate(sizes):
        images = draw.random((size, 1, 4, 4), dtype=np.float32)
        arrays[f"c{k}"] = images, np.append(0, draw.integers(3, size=size - 1))
    empty: dict[str, Any] = {name: ([], []) for name in arrays}
    federation = Federation.from_arrays(arrays, test=empty, classes=3, seed=seed)
    flat = validation.build(network, federation.shape, 3, Randomness(seed))
    return LocalTrainer(
        federation, flat, Randomness(seed), torch.device("cpu"), torch.float64, secret=SECRET
    )


def trained(trainer: LocalTrainer, plan: LocalTraining, step: int = 1) -> torch.Tensor:
    clients = range(len(trainer.ids))
    start = Rows(trainer.start[None], (0,) * len(clients))
    return trainer.train(start, clients, plan, step)


class Counted(StackedRuns):
    """Joint training that notes how many runs it trained each time."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[list[int]] = []

    def train(self, requests: Sequence[Request]) -> None:
        self.runs.append([request.run for request in requests])
        super().train(requests)


def both_ways(
    runs: Sequence[Callable[[], torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[int]]]:
    alone = [run() for run in runs]
    counted = Counted()
    return alone, in_threads(counted.train, runs), counted.runs


@pytest.mark.parametrize("network", ["linear", "mlp-32"])
def test_updates_are_those_of_each_run_alone(network: str) -> None:
    # runs of unequal sizes, so that clients of different runs take different numbers of steps
    sizes = ((25, 3, 11), (7, 40), (12,))
    runs = [
        lambda seed=seed, sizes=sizes: trained(cohort(seed, sizes, network), PLAN)
        for seed, sizes in enumerate(sizes)
    ]
    alone, together, met = both_ways(runs)
    assert met == [[0, 1, 2]]
    for expected, found in zip(alone, together, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_runs_with_other_hyper_parameters_or_networks_train_beside_each_other() -> None:
    runs = [
        lambda: trained(cohort(0), PLAN),
        lambda: trained(cohort(1), LocalTraining(0.1, 1, 5)),
        lambda: trained(cohort(2, network="mlp-32"), PLAN),
        lambda: trained(cohort(3), PLAN),
    ]
    alone, together, met = both_ways(runs)
    assert met == [[0, 1, 2, 3]]
    for expected, found in zip(alone, together, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_run_that_trains_less_often_or_alone_stops_no_other() -> None:
    private = LocalTraining(0.1, 1, 5, clip=1.0, noise=1.0)
    momentum = LocalTraining(0.1, 1, 5, momentum=0.9, keep_momentum=True)

    def three_calls(seed: int) -> torch.Tensor:
        trainer = cohort(seed)
        return torch.stack([trained(trainer, PLAN, step) for step in (1, 2, 3)])

    runs = [
        lambda: three_calls(0),
        lambda: trained(cohort(1), PLAN),
        lambda: trained(cohort(2), private),
        lambda: three_calls(3),
        lambda: trained(cohort(4), momentum),
        lambda: torch.zeros(1),
    ]
    alone, together, met = both_ways(runs)
    assert met == [[0, 1, 3], [0, 3], [0, 3]]
    for expected, found in zip(alone, together, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_an_error_in_one_run_is_raised_when_the_others_have_ended() -> None:
    ended = threading.Event()

    def fails() -> torch.Tensor:
        raise ValueError("this run fails")

    def goes_on() -> torch.Tensor:
        updates = trained(cohort(0), PLAN)
        ended.set()
        return updates

    with pytest.raises(ValueError, match="this run fails"):
        in_threads(StackedRuns().train, [fails, goes_on])
    assert ended.is_set()


def test_an_error_in_training_reaches_every_run_of_the_batch() -> None:
    def broken(requests: Sequence[Request]) -> None:
        raise ArithmeticError("no memory")

    caught = []

    def run() -> None:
        try:
            trained(cohort(0), PLAN)
        except ArithmeticError as error:
            caught.append(str(error))

    in_threads(broken, [run, run, run])
    assert caught == ["no memory"] * 3


def test_other_threads_train_alone() -> None:
    assert current() is None
    in_threads(StackedRuns().train, [lambda: None])
    assert current() is None
    assert cohort(0)._joint is None
