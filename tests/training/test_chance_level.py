"""A run that has taught its models nothing says so; one that has taught them something does not."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation, LabelSwap, Pathological, SecureClusterWarning
from securecluster.cli.main import main
from securecluster.messaging.messages import Rows
from securecluster.models.objectives import Language, Trajectory
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, FedAvg, FineTune, Local, Settings
from securecluster.training.chance_level import at_chance

Samples = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def bright(labels: int = 4, clients: int = 4, size: int = 60) -> dict[str, Samples]:
    """Return images with a white ground, as handwriting is scanned.

    Their mean squared norm is about 700.
    """
    draw = np.random.default_rng(0)
    ink = draw.random((labels, 1, 28, 28)) < 0.1
    found = {}
    for k in range(clients):
        y = np.arange(size) % labels
        x = 1 - (ink[y] & (draw.random((size, 1, 28, 28)) < 0.7))
        found[f"c{k}"] = (x.astype(np.float32), y)
    return found


@pytest.fixture(scope="module")
def white() -> Federation:
    return Federation.from_arrays(bright(), classes=4, seed=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [FedAvg, Local, CFL, FineTune])
def test_too_large_steps_are_told_with_what_to_try(method: Any, white: Federation) -> None:
    with pytest.warns(SecureClusterWarning) as caught:
        fitted = method(rounds=10, lr=0.5, model="mlp").fit(white)
    (said,) = [str(each.message) for each in caught]
    assert caught[0].filename == __file__
    assert said == fitted.warning_
    assert "after 10 rounds the models of 4 of 4 clients do no better than chance" in said
    assert "a lower learning rate (lr=0.2 in place of 0.5), or more rounds, or fewer epochs" in said
    assert fitted.accuracy_.mean() < 0.35


@pytest.mark.few(2)
@pytest.mark.parametrize("method", [FedAvg, Local, CFL, FineTune])
def test_at_a_rate_that_works_nothing_is_said(method: Any, white: Federation) -> None:
    fitted = method(rounds=10, lr=0.02).fit(white)
    assert fitted.warning_ is None
    assert fitted.accuracy_.mean() > 0.9


def test_too_small_steps_are_told(white: Federation) -> None:
    with pytest.warns(
        SecureClusterWarning,
        match=r"try a higher learning rate \(lr=0\.2 in place of 1e-06\), or more rounds$",
    ):
        FedAvg(rounds=10, lr=1e-6).fit(white)


def test_a_short_run_says_nothing(white: Federation) -> None:
    for rounds in (1, 9):
        assert FedAvg(rounds=rounds, lr=0.5).fit(white).warning_ is None


def test_long_runs_are_not_told_to_go_on(white: Federation) -> None:
    with pytest.warns(SecureClusterWarning) as caught:
        FedAvg(rounds=30, epochs=1, lr=0.5).fit(white)
    assert str(caught[0].message).endswith("(lr=0.2 in place of 0.5)")


@pytest.mark.filterwarnings("ignore:.*lost in the noise")
def test_under_noise_less_noise_is_an_advice() -> None:
    data = {
        name: (x, np.where(np.arange(len(y)) % 10 < 9, 0, y)) for name, (x, y) in bright().items()
    }
    # so a model made of noise is hardly ever right as often as a guess
    mostly = Federation.from_arrays(data, classes=4, seed=0)
    with pytest.warns(SecureClusterWarning, match="or less noise, or more rounds"):
        FedAvg(rounds=10, lr=0.02, clip=1.0, noise=50.0, model="linear").fit(mostly)


def test_some_clients_are_enough() -> None:
    """One of four clients holds white images, and trains alone at the usual rate."""
    data = bright()
    for name in ("c1", "c2", "c3"):
        x, y = data[name]
        data[name] = (1 - x, y)
    federation = Federation.from_arrays(data, classes=4, seed=0)
    with pytest.warns(SecureClusterWarning, match="of 1 of 4 clients"):
        Local(rounds=10, lr=0.5).fit(federation)
    few = {**data, "c4": data["c3"]}
    fitted = Local(rounds=10, lr=0.5).fit(Federation.from_arrays(few, classes=4, seed=0))
    assert fitted.warning_ is None


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [FedAvg, Local, CFL])
def test_clients_of_one_or_two_classes_are_no_mistake(method: Any) -> None:
    two = Federation.simulate(
        "digits", scenario=Pathological(clusters=5, labels=2), clients=10, seed=0
    )
    assert method(rounds=10).fit(two).warning_ is None
    one = Federation.simulate("digits", clients=10, seed=0)
    shards = tuple(
        replace(s, y=s.y * 0 + k, y_test=s.y_test * 0 + k) for k, s in enumerate(one.shards)
    )
    assert method(rounds=10).fit(replace(one, shards=shards)).warning_ is None


def test_clients_that_contradict_each_other_are_no_mistake() -> None:
    federation = Federation.simulate("digits", scenario=LabelSwap(clusters=5), clients=10, seed=0)
    assert FedAvg(rounds=10).fit(federation).warning_ is None


def test_without_test_data_the_loss_alone_tells(white: Federation) -> None:
    shards = tuple(replace(s, x_test=s.x_test[:0], y_test=s.y_test[:0]) for s in white.shards)
    with pytest.warns(SecureClusterWarning, match="4 of 4"):
        FedAvg(rounds=10, lr=0.5).fit(replace(white, shards=shards))
    assert FedAvg(rounds=10, lr=0.02).fit(replace(white, shards=shards)).warning_ is None


def text(predictable: bool) -> Federation:
    draw = np.random.default_rng(0)
    clients = {}
    for k in range(3):
        tokens = draw.integers(0, 12, (60, 9))
        if predictable:
            tokens = (tokens[:, :1] + np.arange(9)) % 12
        clients[f"c{k}"] = (tokens[:, :-1], tokens[:, 1:])
    return Federation.from_arrays(clients, objective=Language(), classes=12, seed=0)


@pytest.mark.exhaustive
def test_text_is_held_against_a_guess_among_all_tokens() -> None:
    """Not against their frequencies, which a network may not have left behind yet."""
    assert FedAvg(rounds=12).fit(text(True)).warning_ is None
    assert FedAvg(rounds=10, lr=0.3).fit(text(False)).warning_ is None
    with pytest.warns(
        SecureClusterWarning, match=r"do no better than chance \(training loss .*, chance 2\.48\)"
    ):
        FedAvg(rounds=10, lr=1e3).fit(text(False))


@pytest.mark.exhaustive
def test_trajectories_are_held_against_the_mean_position() -> None:
    draw = np.random.default_rng(0)
    clients = {}
    for k in range(3):
        start, step = draw.random((60, 1, 2)) * 0.8, draw.normal(size=(60, 1, 2)) * 0.01
        path = (start + step * np.arange(6)[:, None]).astype(np.float32)
        clients[f"c{k}"] = (path[:, :-1], path[:, -1])
    federation = Federation.from_arrays(clients, objective=Trajectory((100.0, 100.0)), seed=0)
    assert FedAvg(rounds=12).fit(federation).warning_ is None
    with pytest.warns(SecureClusterWarning, match="higher learning rate"):
        FedAvg(rounds=10, lr=1e-6).fit(federation)


def test_no_model_that_ignores_its_input_is_taken_for_one_that_learned(small: Federation) -> None:
    """Whatever it answers; its loss is at least the entropy of the labels, which the best such
    answer has.
    """
    cohort = build_client(FedAvg(model="linear"), small, Settings(dtype="float64")).client.cohort
    for seed in range(20):
        theta = torch.zeros(cohort.model.dimension, dtype=torch.float64)
        theta[-10:] = torch.randn(
            10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        models = Rows(theta[None], (0,) * 6)
        assert at_chance(cohort, models, cohort.scores(models)).clients == list(range(6))


def test_the_command_line_says_it_and_quiet_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dull = ["run", "fedavg", "--rounds", "10", "--clients", "4", "--lr", "2", "--epochs", "1"]
    assert main([*dull, "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().err
    assert (
        "securecluster: note: after 10 rounds the models of 4 of 4 clients do no better than chance"
        in said
    )
    assert "--lr 0.2 in place of 2" in said
    assert main([*dull, "--quiet", "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "a" / "result.json").read_text())["clusters"] == 1


def test_a_run_in_a_folder_says_it_once_it_is_whole(white: Federation, tmp_path: Path) -> None:
    with pytest.warns(SecureClusterWarning, match="of 4 of 4 clients"):
        FedAvg(rounds=10, lr=0.5).fit(white, folder=tmp_path / "r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = FedAvg(rounds=10, lr=0.5).fit(white, folder=tmp_path / "r")
    assert again.warning_ is None
    assert (tmp_path / "r" / "result.json").is_file()
