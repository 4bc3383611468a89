"""Noise of a private run beside its largest signal, known before the run from public quantities."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest

from securecluster import Federation, SecureClusterWarning, power_check, sweep
from securecluster.cli.main import main
from securecluster.data.facts import Facts
from securecluster.errors import UsageError
from securecluster.parties import dry_run
from securecluster.parties.power_check import (
    CARRIES,
    CLUSTERS,
    DOUBTFUL,
    DROWNED,
    LIMITS,
    TRAINING,
    Power,
    power_of,
)
from securecluster.protocols import (
    CFL,
    FLHC,
    FLUX,
    IFCA,
    CLoVE,
    FedAvg,
    Hidden,
    Local,
    OneShot,
    Settings,
    Signature,
)
from securecluster.training.local_trainer import LocalTrainer

CLIENT: dict[str, Any] = {"clip": 1.0, "model": "linear", "rounds": 3, "mask": "none"}
EXAMPLE: dict[str, Any] = {**CLIENT, "dp_unit": "example", "epochs": 1, "batch_size": 1000}
DIMENSION = 650  # of the linear network of digits
SHARES = {"placement": "distributed", "aggregation": "secagg"}


@pytest.fixture(scope="module")
def digits() -> Federation:
    return Federation.simulate("digits", clients=8, samples=40, seed=0)


def ratio(protocol: Any, federation: Federation, use: str) -> float:
    check = power_check(protocol, federation)
    assert check is not None
    worst = check.worst(use)
    assert worst is not None
    return worst.ratio


def test_a_run_without_noise_has_no_check(digits: Federation) -> None:
    assert power_check(CFL(**CLIENT), digits) is None
    assert power_check(Local(**CLIENT, noise=1.0), digits) is None  # nothing leaves a client


@pytest.mark.parametrize(
    ("options", "averaged"),
    [({}, math.sqrt(8)), ({"placement": "central"}, 8), (SHARES, 8), ({"participation": 0.5}, 2)],
)
def test_noise_of_a_mean_of_updates_is_what_it_is_drawn_with(
    options: dict[str, Any], averaged: float, digits: Federation
) -> None:
    found = ratio(FedAvg(**CLIENT, noise=0.5, **options), digits, TRAINING)
    # z·S in each of d coordinates, over S, of a mean
    assert found == pytest.approx(0.5 * math.sqrt(DIMENSION) / averaged)


def test_a_runs_average_has_as_much_noise_as_the_check_says(digits: Federation) -> None:
    # updates that are clipped to next to nothing leave the noise alone
    options = {**CLIENT, "rounds": 1, "clip": 1e-3, "noise": 20.0}
    fitted = FedAvg(**options).fit(digits, Settings(keys_from_seed=True))
    moved = fitted.client_models_.table[0] - fitted.network_.initial()
    length = float(moved.double().norm())
    check = power_check(FedAvg(**options), digits)
    assert check is not None
    worst = check.worst(TRAINING)
    assert worst is not None
    assert length / 1e-3 == pytest.approx(worst.ratio, rel=0.1)


def test_updates_that_are_read_singly_have_all_of_their_noise(digits: Federation) -> None:
    protocol = CFL(**CLIENT, noise=0.1)
    assert ratio(protocol, digits, CLUSTERS) == pytest.approx(0.1 * math.sqrt(DIMENSION))
    short = CFL(**CLIENT, noise=0.1, sketch=64)
    assert ratio(short, digits, CLUSTERS) == pytest.approx(0.1 * math.sqrt(64))


def test_steps_over_all_samples_have_noise_over_their_number(digits: Federation) -> None:
    # one step of the gradient, of n = 40: z·C/n in each coordinate, over C
    found = ratio(FedAvg(**EXAMPLE, noise=2.0), digits, TRAINING)
    assert found == pytest.approx(2.0 * math.sqrt(DIMENSION) / 40 / math.sqrt(8))


def test_losses_have_noise_by_the_number_of_models(digits: Federation) -> None:
    check = power_check(CLoVE(**EXAMPLE, noise=2.0, k=4), digits)
    assert check is not None
    (losses,) = [power for power in check.powers if power.kind == "losses"]
    assert losses.ratio == pytest.approx(2.0 * math.sqrt(4) / 40)
    # clusters also follow from models, whose training has noise
    assert {power.kind for power in check.powers if power.use == CLUSTERS} == {"losses", "models"}


def test_means_over_examples_have_noise_over_their_number(digits: Federation) -> None:
    kind = {"signature_blocks": "plain", "signature_centre": 0.3, "signature_releases": 1}
    protocol = Signature(**EXAMPLE, noise=1.0, signature_noise=3.0, **kind)
    assert ratio(protocol, digits, CLUSTERS) == pytest.approx(3.0 * math.sqrt(64) / 40)


def test_descriptors_have_limits_of_their_own(digits: Federation) -> None:
    for moments in (1, 2):
        # noise of descriptors is a multiple of that of training
        protocol = FLUX(**EXAMPLE, k=2, pre_rounds=0, moments=moments, noise=1.0)
        check = power_check(protocol, digits)
        assert check is not None
        kinds = {power.kind for power in check.powers if power.use == CLUSTERS}
        assert kinds == {"descriptor"}


def test_a_row_of_blocks_is_an_update_of_its_cluster(digits: Federation) -> None:
    found = ratio(Hidden(**CLIENT, noise=0.5, k=2, **SHARES), digits, TRAINING)
    assert found == pytest.approx(0.5 * math.sqrt(DIMENSION) / 4)


def test_models_that_stay_alone_are_no_means(digits: Federation) -> None:
    alone = ratio(Local(**EXAMPLE, noise=2.0), digits, TRAINING)
    assert alone == pytest.approx(2.0 * math.sqrt(DIMENSION) / 40)
    check = power_check(Local(**EXAMPLE, noise=2.0), digits)
    assert check is not None
    assert check.verdict(CLUSTERS) is None


def test_the_target_decides_the_noise(digits: Federation) -> None:
    loose, strict = (
        ratio(FedAvg(**CLIENT, target_epsilon=epsilon), digits, TRAINING) for epsilon in (8.0, 1.0)
    )
    assert strict > 4 * loose


def test_data_are_not_read(digits: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a power check trains")

    protocol = IFCA(**EXAMPLE, noise=1.0, k=2, starts=1)
    config = protocol.config(digits, "float32")
    facts = digits.facts
    assert isinstance(facts, Facts)
    monkeypatch.setattr(LocalTrainer, "train", read)
    monkeypatch.setattr("securecluster.parties.power_check._KNOWN", {})
    check = power_of(protocol, facts, config)
    monkeypatch.setattr("securecluster.parties.power_check._KNOWN", {})
    noise = np.random.default_rng(0)
    others = [
        (noise.random(shard.x.shape).astype(shard.x.dtype), shard.y) for shard in digits.shards
    ]
    other = Federation.from_arrays(dict(zip(digits.names, others, strict=True)), seed=0)
    assert check == power_of(protocol, other.facts, config)


def test_a_large_network_has_a_stand_in_but_its_own_numbers(
    digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = CFL(**{**CLIENT, "model": "mlp"}, noise=0.1)
    whole = power_check(protocol, digits)
    monkeypatch.setattr(dry_run, "LARGE", 1000)
    monkeypatch.setattr("securecluster.parties.power_check._KNOWN", {})
    assert power_check(protocol, digits) == whole


def power(use: str, kind: str, value: float) -> Power:
    return Power("send", "delta", kind, use, 10, 1.0, value)


@pytest.mark.parametrize(("use", "kind"), LIMITS)
def test_verdicts_are_by_the_limits(use: str, kind: str) -> None:
    carried, drowned = LIMITS[use, kind]
    assert 0 < carried < drowned
    assert power(use, kind, carried).verdict == CARRIES
    assert power(use, kind, carried * 1.001).verdict == DOUBTFUL
    assert power(use, kind, drowned).verdict == DROWNED
    assert power(use, kind, carried).strain == pytest.approx(0, abs=1e-12)
    assert power(use, kind, drowned).strain == pytest.approx(1)


OPTION = re.compile(r"--([\w-]+) ([\w.,]+)[),]")


@pytest.mark.parametrize(
    "protocol",
    [
        CFL(**{**CLIENT, "model": "mlp"}, noise=0.5),
        FedAvg(**{**CLIENT, "model": "mlp"}, noise=6.0),
        FedAvg(**{**CLIENT, "rounds": 40}, target_epsilon=0.5, aggregation="plain"),
        FLHC(**EXAMPLE, noise=5.0, pre_rounds=1),
        OneShot(**EXAMPLE, noise=1.0, gram_noise=50.0, tasks=2),
    ],
)
def test_remedies_do_what_they_say(protocol: Any, digits: Federation) -> None:
    check = power_check(protocol, digits)
    assert check is not None
    assert check.remedies
    for remedy in check.remedies:
        options: dict[str, Any] = {}
        for name, text in OPTION.findall(remedy.change):
            value: Any = json.loads(text.replace(",", "")) if text[0].isdigit() else text
            options[name.replace("-", "_")] = value
        if not options:
            continue  # more clients
        changed = power_check(type(protocol)(**{**protocol.get_params(), **options}), digits)
        assert changed is not None
        used = [power.ratio for power in changed.powers if power.use == remedy.use]
        # values of options are rounded in words, and ε is found in steps
        assert any(found == pytest.approx(remedy.ratio, rel=0.25) for found in used), remedy


def test_what_carries_needs_no_remedy(digits: Federation) -> None:
    check = power_check(CFL(**CLIENT, noise=0.001), digits)
    assert check is not None
    assert check.summary == "clusters fine, training fine"
    assert check.remedies == ()
    assert check.warning is None


@pytest.mark.few(8)
@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", cases.VARIANTS)
def test_every_protocol_with_noise_has_a_check(name: str, unit: str, digits: Federation) -> None:
    ratios = []
    for noise in (0.5, 1.0):
        try:
            made = cases.variant(name, rounds=2, clip=1.0, noise=noise, dp_unit=unit, mask="none")
            check = power_check(made, digits)
        except UsageError:
            pytest.skip("no such run")
        powers = check.powers if check is not None else ()
        assert all(math.isfinite(power.ratio) and power.ratio > 0 for power in powers)
        ratios.append([power.ratio for power in powers])
    # more noise is never less, and twice as much for what has the run's multiplier
    for less, more in zip(*ratios, strict=True):
        assert more == pytest.approx(2 * less) or more == pytest.approx(less)


def test_a_run_tells_before_it_begins_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--clients", "6", "--rounds", "2", "--model", "linear", "--clip", "1", "--noise", "1"]
    folder = tmp_path / "run"
    assert main(["run", "cfl", *small, "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("power check: clusters are lost in the noise") < printed.index("round ")
    entry = json.loads((folder / "result.json").read_text())["power"]
    assert entry["clusters"] == DROWNED
    assert entry["warning"] in entry["sentences"] or "--sketch 64" in entry["warning"]
    assert main(["report", str(folder)]) == 0
    assert "clusters are lost in the noise" in capsys.readouterr().out.replace("\n", " ")


def test_a_run_without_noise_says_nothing_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    small = ["--clients", "4", "--rounds", "1", "--model", "linear"]
    assert main(["run", "cfl", *small, "--out", str(folder)]) == 0
    assert "power" not in capsys.readouterr().out
    assert "power" not in json.loads((folder / "result.json").read_text())


def test_fit_warns_with_options_as_python_has_them(digits: Federation) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SecureClusterWarning)
        CFL(**{**CLIENT, "rounds": 10}, noise=1.0).fit(digits)
    assert re.search("clusters are lost in the noise.*sketch=64", str(caught[0].message))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SecureClusterWarning)
        CFL(**{**CLIENT, "rounds": 10}, noise=0.001).fit(digits)
        CFL(**CLIENT, noise=1.0).fit(digits)  # in three rounds nobody expects clusters
    # the runs may end without clusters, and say so
    assert not any("lost in the noise" in str(warning.message) for warning in caught)


def test_sweeps_have_a_column_of_verdicts() -> None:
    options = {"data": "digits", "clients": 8, "samples": 40}
    swept = sweep([CFL(**CLIENT)], noise=[0.0, 1.0], seeds=1, **options)
    found = dict(zip(swept["noise"], swept["power"], strict=True))
    assert found[1.0] == "clusters lost in noise, training doubtful"
    assert swept["power"].isna().tolist() == [True, False]
