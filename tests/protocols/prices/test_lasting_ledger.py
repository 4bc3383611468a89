"""Nothing that was released leaves the ledger: whenever a run is killed, and however its resumption
rounds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from securecluster import Federation
from securecluster.cli.main import main
from securecluster.errors import SecureClusterError
from securecluster.messaging.messages import Call, Response
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.ledger import Event, Ledger, Recall
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    ClusteringProtocol,
    FedAvg,
    LocalKMeans,
    Settings,
)
from securecluster.runtime.run import Run
from securecluster.runtime.transport import InProcess
from securecluster.training.local_trainer import LocalTrainer

Z = 3.0
FULL = Settings(transcript="full", threads=1)
CLIENT = {"rounds": 3, "epochs": 1, "model": "linear", "clip": 0.5, "noise": Z}
EXAMPLE = {**CLIENT, "dp_unit": "example", "batch_size": 10}
WAYS: dict[str, tuple[type[ClusteringProtocol], dict[str, Any]]] = {
    "rows": (FedAvg, CLIENT),
    "central sums": (FedAvg, {**CLIENT, "placement": "central"}),
    "masked rows": (FLHC, {**CLIENT, "pre_rounds": 1, "mask": "permutation"}),
    "examples": (FedAvg, EXAMPLE),
    "trained alone": (LocalKMeans, {**EXAMPLE, "k": 2, "local_rounds": 2}),
    "no noise": (CFL, {"rounds": 3, "epochs": 1, "model": "linear"}),
}
SAME = ("ledger.jsonl", "history.jsonl", "server.safetensors", "transcript/index.jsonl")


class KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def small() -> Federation:
    return Federation.simulate("digits", clients=4, samples=40, seed=0)


@dataclass(frozen=True)
class Whole:
    """A run that nobody stopped: what it ended with, and its folder."""

    ledger: Ledger
    folder: Path


@pytest.fixture(scope="module")
def whole(small: Federation, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """Return the run of a way, which is fitted once."""

    @cache
    def fitted(way: str) -> Whole:
        kind, params = WAYS[way]
        folder = tmp_path_factory.mktemp("whole")
        return Whole(kind(**params).fit(small, FULL, folder=folder).ledger_, folder)

    return fitted


def test_what_was_released_is_on_the_disk_and_the_rest_does_not_wait_for_it(
    small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut takes nothing out of the ledger, of the run or of its newcomers."""
    sizes: dict[int, int] = {}
    real = os.fsync

    def note(descriptor: int) -> None:
        real(descriptor)
        status = os.fstat(descriptor)
        sizes[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", note)
    folder = tmp_path / "run"
    fitted = FLHC(**{**CLIENT, "pre_rounds": 1}).fit(small, FULL, folder=folder)
    ledger = (folder / "ledger.jsonl").stat()
    assert sizes[ledger.st_ino] == ledger.st_size
    assert folder.stat().st_ino in sizes
    for name in ("history.jsonl", "transcript/index.jsonl"):
        assert (folder / name).stat().st_ino not in sizes
    sizes.clear()
    fitted.join(small.select([0]))
    newcomers = (folder / "newcomers.jsonl").stat()
    assert sizes[newcomers.st_ino] == newcomers.st_size
    assert folder.stat().st_ino in sizes


def killed(method: ClusteringProtocol, clients: Federation, folder: Path, number: int) -> None:
    """Run until the checkpoint `number` is about to be written."""

    def die(run: Run) -> None:
        if run._clock.number + 1 == number:
            raise KilledError
        written(run)

    written = Run._checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_checkpoint", die)
        with pytest.raises(KilledError):
            method.fit(clients, FULL, folder=folder)


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine on which last bits of training round differently."""
    trained = LocalTrainer.train

    def train(self: LocalTrainer, *given: Any, **named: Any) -> torch.Tensor:
        return trained(self, *given, **named) * (1 + 2.0**-22)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "train", train)
        yield patch


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    del found["seconds"]
    return found


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 2, cases.exhaustive(3)])
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_that_repeats_every_bit_ends_with_the_ledger_of_one_that_was_left_alone(
    way: str, number: int, small: Federation, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    kind, params = WAYS[way]
    expected = whole(way)
    killed(kind(**params), small, tmp_path / "run", number)
    left = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    assert left  # what was released stands there, though no checkpoint came
    again = kind(**params).fit(small, FULL, folder=tmp_path / "run")
    for name in SAME:
        assert (tmp_path / "run" / name).read_bytes() == (expected.folder / name).read_bytes(), name
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes().startswith(left)
    assert result(tmp_path / "run") == result(expected.folder)
    assert again.ledger_ == expected.ledger


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_release_that_was_made_twice_with_other_bits_is_priced_twice(
    number: int,
    small: Federation,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed(FedAvg(**CLIENT), small, tmp_path / "run", number)
    request.getfixturevalue("other_machine")
    found = FedAvg(**CLIENT).fit(small, FULL, folder=tmp_path / "run")
    assert found.ledger_.price(1e-5).epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(4) / Z, 1e-5), rel=1e-8
    )
    assert result(tmp_path / "run")["privacy"]["epsilon"] == found.ledger_.price(1e-5).epsilon
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert "4 more releases" in capsys.readouterr().out


def test_a_trusted_servers_sum_is_another_release_for_all_who_are_in_it(
    small: Federation, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    method = FedAvg(**{**CLIENT, "placement": "central"})
    killed(method, small, tmp_path / "run", 2)
    request.getfixturevalue("other_machine")
    found = method.fit(small, FULL, folder=tmp_path / "run")
    assert found.ledger_.price(1e-5).epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(4) / Z, 1e-5), rel=1e-8
    )


def test_a_repeated_training_counts_again_with_the_first_release_that_differs() -> None:
    alone = Event("train_locally", "gather", (), 1, (0, 1), "dp-sgd", Z, kept=True, step=1)
    told = Event(
        "send_model", "gather", ("delta",), 2, (0, 1), "free", step=2, digests=("aa", "bb")
    )
    other = Event(
        "send_model", "gather", ("delta",), 2, (0, 1), "free", step=2, digests=("aa", "cc")
    )
    recall = Recall([alone, told])
    assert recall.new([alone]) == []
    assert recall.new([other]) == [replace(alone.select([1]), again=True), other.select([1])]
    assert Recall([alone, told]).new([alone]) + Recall([alone, told]).new([told]) == []


def test_a_repeated_training_counts_again_though_the_release_it_led_to_is_not_asked_for_again() -> (
    None
):
    alone = Event("train_locally", "gather", (), 1, (0, 1), "dp-sgd", Z, kept=True, step=1)
    told = Event("send_model", "gather", ("delta",), 2, (0,), "free", step=2, digests=("aa",))
    later = Event(
        "send_model", "gather", ("delta",), 3, (0, 1), "free", step=3, digests=("dd", "ee")
    )
    recall = Recall([alone, told])
    assert recall.new([alone]) == []
    assert recall.new([later]) == [replace(alone.select([0]), again=True), later]


def test_two_trainings_in_the_same_batches_are_priced_as_if_these_were_known() -> None:
    first = Event("train", "sum", (), 1, (0,), "dp-sgd", 2.0, batch=10, step=1, digests=("aa",))
    samples = {0: 50}
    (second,) = Recall([first]).new([replace(first, digests=("bb",))])
    assert second.again
    both = Ledger([first, second], samples).price(1e-5).epsilon
    assert both > Ledger([first, replace(second, again=False)], samples).price(1e-5).epsilon
    # five steps each, on examples that are known to be in them
    assert both > gaussian_epsilon(math.sqrt(10) / 2.0, 1e-5)


@pytest.mark.parametrize("way", [CLIENT, EXAMPLE])
def test_a_choice_says_nothing_of_its_noise_so_each_costs(
    way: dict[str, Any], small: Federation
) -> None:
    """Newcomers of one name with other data: noise is drawn anew, and the model that they choose is
    often the same.
    """
    fitted = IFCA(**{**way, "k": 2, "starts": 1, "rounds": 1, "mask": "none", "noise": 3.0}).fit(
        small
    )
    seen = []
    for seed in range(4):
        other = Federation.simulate("digits", clients=4, samples=40, seed=10 + seed).select([0])
        fitted.join(replace(other, names=("nina",)))
        seen.append(fitted.ledger_.of(["nina"]).price(1e-5).epsilon)
    events = [e for e in fitted.ledger_.of(["nina"]).events if e.mechanism == "gaussian"]
    assert len(events) == 4
    assert seen == sorted(set(seen))


def test_a_torn_line_is_dropped_and_its_release_recorded_again(
    small: Federation, tmp_path: Path
) -> None:
    whole = FedAvg(**CLIENT).fit(small, FULL, folder=tmp_path / "whole")
    killed(FedAvg(**CLIENT), small, tmp_path / "run", 2)
    path = tmp_path / "run" / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert FedAvg(**CLIENT).fit(small, FULL, folder=tmp_path / "run").ledger_ == whole.ledger_
    assert path.read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()


def test_a_line_after_the_checkpoint_that_does_not_parse_is_a_sentence(
    small: Federation, tmp_path: Path
) -> None:
    killed(FedAvg(**CLIENT), small, tmp_path, 2)
    path = tmp_path / "ledger.jsonl"
    first, last = path.read_text().splitlines(keepends=True)
    for wrong in (
        "{}\n",
        "[1, 2]\n",
        last.replace('"step": 2', '"stop": 2'),
        last.replace('"ids": [0, ', '"ids": ['),
    ):
        path.write_text(first + wrong)
        with pytest.raises(SecureClusterError, match=r"ledger\.jsonl") as caught:
            FedAvg(**CLIENT).fit(small, FULL, folder=tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["lacks", "changes"])
def test_replay_refuses_a_ledger_that_lacks_or_changes_an_event(
    change: str,
    small: Federation,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from securecluster.folders import run_folder

    killed(FedAvg(**CLIENT), small, tmp_path, 2)
    request.getfixturevalue("other_machine")
    FedAvg(**CLIENT).fit(small, FULL, folder=tmp_path)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4  # round 2 twice
    for k in (0, 2, 3):
        wrong = (
            []
            if change == "lacks"
            else [lines[k].replace('"noise_multiplier": 3.0', '"noise_multiplier": 4.0')]
        )
        path.write_text("".join([*lines[:k], *wrong, *lines[k + 1 :]]))
        run_folder.seal(tmp_path, (tmp_path / "result.json").read_bytes())
        assert main(["replay", str(tmp_path)]) == 2
        assert "ledger.jsonl differs from the replay" in capsys.readouterr().err


def test_what_a_part_of_the_clients_sent_before_a_kill_is_in_the_ledger(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The plain sum asks 32 clients first."""
    clients = Federation.simulate("digits", clients=40, samples=10, seed=0)
    method, answered = FedAvg(**{**CLIENT, "rounds": 1}), []
    exchange = InProcess.exchange

    def die(self: InProcess, call: Call) -> Response:
        if answered:
            raise KilledError
        answered.append(call.to)
        return exchange(self, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcess, "exchange", die)
        with pytest.raises(KilledError):
            method.fit(clients, FULL, folder=tmp_path)
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line)["ids"]) for line in lines] == answered
    request.getfixturevalue("other_machine")
    ledger = method.fit(clients, FULL, folder=tmp_path).ledger_
    priced = [ledger.of([name]).price(1e-5).epsilon for name in clients.names]
    once, twice = (gaussian_epsilon(math.sqrt(times) / Z, 1e-5) for times in (1, 2))
    assert priced == pytest.approx([twice] * 32 + [once] * 8)
