"""Options that a target ε chooses where they are not given, from public quantities alone."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sklearn.base import clone

from securecluster import (
    CFL,
    MRMTL,
    FedAvg,
    Federation,
    Hidden,
    LabelSwap,
    OneShot,
    Signature,
    power_check,
)
from securecluster.cli.main import main
from securecluster.errors import UsageError
from securecluster.parties.power_check import TRAINING
from securecluster.protocols import Settings
from securecluster.protocols.common.options import target_defaults
from securecluster.protocols.common.options.target_defaults import chosen_for, given_options
from securecluster.training.local_trainer import LocalTrainer

SETTINGS = Settings(keys_from_seed=True)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return Federation.simulate("digits", clients=12, samples=40, seed=0)


def strain(protocol: Any, federation: Federation) -> float:
    check = power_check(protocol, federation)
    assert check is not None
    worst = check.worst(TRAINING)
    assert worst is not None
    return worst.strain


def test_noise_is_shared_and_a_small_network_trains_in_few_rounds(digits: Federation) -> None:
    chosen = chosen_for(FedAvg(target_epsilon=4.0), digits.facts)
    assert chosen == {"clip": 1.0, "aggregation": "secagg", "model": "linear", "rounds": 10}
    # what little noise leaves alone stays as it is in runs without a target
    assert chosen_for(FedAvg(target_epsilon=1e4), digits.facts) == {
        "clip": 1.0,
        "aggregation": "secagg",
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [("rounds", 40), ("rounds", 7), ("model", "auto"), ("aggregation", "plain"), ("clip", 2.0)],
)
def test_what_is_given_stays_also_with_its_usual_value(
    option: str, value: Any, digits: Federation
) -> None:
    made = FedAvg(target_epsilon=4.0, **{option: value})
    settled = made.privacy.settled(made, digits.facts)
    assert getattr(settled, option) == value
    assert option not in chosen_for(made, digits.facts)
    later = FedAvg(target_epsilon=4.0).set_params(**{option: value})
    assert given_options(later) == given_options(made) == {"target_epsilon", option}


def test_copies_know_what_was_given(digits: Federation) -> None:
    made = FedAvg(target_epsilon=4.0, rounds=40)
    for other in (clone(made), copy.copy(made), copy.deepcopy(made)):
        assert given_options(other) == {"target_epsilon", "rounds"}
    whole = FedAvg(**made.get_params())
    # of all of these nothing but the clip norm is no value that a run with noise can have
    assert chosen_for(whole, digits.facts) == {"clip": 1.0}
    assert clone(FedAvg(target_epsilon=4.0)).get_params() == FedAvg(target_epsilon=4.0).get_params()


def test_the_choice_helps_by_the_formulas(digits: Federation) -> None:
    usual = FedAvg(**FedAvg(target_epsilon=4.0).get_params())
    assert strain(FedAvg(target_epsilon=4.0), digits) < strain(usual, digits) - 1


def test_without_a_target_nothing_is_chosen(digits: Federation) -> None:
    for made in (FedAvg(), FedAvg(clip=1.0, noise=1.0)):
        assert made.privacy.settled(made, digits.facts) is made
        assert "chosen" not in made.config(digits, "float32")


def test_clusters_get_a_share_of_the_budget(digits: Federation) -> None:
    made = Signature(target_epsilon=4.0, k=2, rounds=8)
    chosen = chosen_for(made, digits.facts)
    assert chosen["cluster_noise"] < 1
    usual = made.privacy.settled(made, digits.facts).config(digits, "float32")
    equal = Signature(target_epsilon=4.0, k=2, rounds=8, cluster_noise=1.0)
    other = equal.privacy.settled(equal, digits.facts).config(digits, "float32")
    assert usual["signature_noise"] == chosen["cluster_noise"] * usual["noise"]
    assert other["signature_noise"] == other["noise"]
    # the whole run costs the same, so training pays for it, and not more than a quarter
    assert 1 < usual["noise"] / other["noise"] <= target_defaults.DEARER


def test_gram_matrices_have_the_same_option(digits: Federation) -> None:
    made = OneShot(target_epsilon=4.0, clip=1.0, model="linear", rounds=2, cluster_noise=0.25)
    config = made.config(digits, "float32")
    assert config["gram_noise"] == config["noise"] / 4


def test_methods_with_several_mechanisms_take_one_that_bears_noise(digits: Federation) -> None:
    chosen = chosen_for(CFL(target_epsilon=8.0, dp_unit="example", rounds=24), digits.facts)
    assert chosen["signature"] == "gradient"
    # a mechanism that is given is the only one
    given = CFL(target_epsilon=8.0, dp_unit="example", rounds=8, sketch=32)
    assert not {"signature", "sketch"} & chosen_for(given, digits.facts).keys()


def test_dp_sgd_gives_up_no_rounds_however_drowned(digits: Federation) -> None:
    drowned = FedAvg(target_epsilon=0.2, dp_unit="example")
    assert strain(drowned, digits) > 1
    assert chosen_for(drowned, digits.facts) == {"clip": 1.0, "model": "linear"}
    # of whole clients' updates the noise counts in full
    assert chosen_for(FedAvg(target_epsilon=0.2), digits.facts)["rounds"] == target_defaults.FEWEST


def test_a_network_that_is_tuned_without_noise_stays_until_it_is_drowned(
    digits: Federation,
) -> None:
    tuned: dict[str, Any] = {"dp_unit": "example", "tune_rounds": 3}
    assert chosen_for(FedAvg(target_epsilon=4.0, **tuned), digits.facts) == {"clip": 1.0}
    # without tuning the larger network is not worth its noise
    untuned = FedAvg(target_epsilon=4.0, dp_unit="example")
    assert chosen_for(untuned, digits.facts)["model"] == "linear"
    drowned = FedAvg(target_epsilon=0.2, **tuned)
    assert strain(FedAvg(**{**drowned.get_params(), "clip": 1.0}), digits) > 1
    chosen = chosen_for(drowned, digits.facts)
    assert chosen == {"clip": 1.0, "model": "linear", "rounds": target_defaults.FEWEST}


LARGE = {"batch_size": 50, "lr": 0.2 * (50 / 20) ** 0.5}


@pytest.mark.parametrize(
    ("sizes", "options", "changed"),
    [
        # a quarter of the smallest client's samples, and the rate by their root
        ((200, 900), {}, LARGE),
        ((250, 900), {"keep_best": 0.2}, LARGE),
        ((200, 900), {"momentum": 0.5}, LARGE),
        # at most 200, and no fewer than without noise
        ((9000, 900), {}, {"batch_size": 200, "lr": 0.632}),
        ((9000, 83), {}, {}),
        # what is given stays, and what a large rate does not suit
        ((200, 900), {"batch_size": 20}, {}),
        ((200, 900), {"lr": 0.1}, {}),
        ((200, 900), {"accumulate": 2}, {}),
        ((200, 900), {"optimizer": "adam"}, {}),
        ((200, 900), {"weight_decay": 0.1}, {}),
        ((200, 900), {"tune_rounds": 1}, {}),
        ((200, 900), {"dp_unit": "client"}, {}),
    ],
)
def test_dp_sgd_takes_larger_batches_at_a_larger_rate(
    sizes: tuple[int, int], options: dict[str, Any], changed: dict[str, Any], digits: Federation
) -> None:
    facts = replace(digits.facts, clients=len(sizes), samples=sizes)
    # so little noise that nothing else is chosen
    made = FedAvg(**{"target_epsilon": 1e4, "dp_unit": "example", "model": "linear"} | options)
    chosen = chosen_for(made, facts)
    assert {name: chosen[name] for name in ("batch_size", "lr") if name in chosen} == (
        pytest.approx(changed, rel=1e-3)
    )
    # numbers of samples are public with such noise alone
    assert set(chosen) - {"batch_size", "lr"} <= {"clip", "aggregation"}


def test_larger_batches_suit_the_network_and_terms_of_the_method(digits: Federation) -> None:
    facts = replace(digits.facts, samples=(400,) * 12, bright=True)
    # the rate is that of the network that is chosen: the linear one's of bright images
    drowned = chosen_for(FedAvg(target_epsilon=0.2, dp_unit="example", model="auto"), facts)
    assert drowned["lr"] == pytest.approx(0.03 * 5**0.5, rel=1e-3)
    # MR-MTL has a term that no clip bounds, unless λ is zero
    for regularization, larger in ((0.1, False), (0.0, True)):
        made = MRMTL(target_epsilon=4.0, dp_unit="example", regularization=regularization)
        assert ("batch_size" in chosen_for(made, facts)) is larger


def test_larger_batches_cost_fewer_noises_and_no_more_epsilon() -> None:
    federation = Federation.simulate("digits", clients=4, samples=120, seed=0)
    options: dict[str, Any] = {"target_epsilon": 4.0, "dp_unit": "example", "rounds": 2}
    fitted = FedAvg(**options).fit(federation, SETTINGS)
    assert fitted.result_.method.batch_size == 30
    assert 3.9 < fitted.ledger_.price(1e-5).epsilon <= 4.0


@pytest.mark.parametrize(
    "made",
    [
        CFL(target_epsilon=8.0, dp_unit="example", rounds=8),
        Hidden(target_epsilon=8.0, k=2, rounds=8),
        Signature(target_epsilon=4.0, k=2, rounds=8),
    ],
)
def test_the_choice_searches_for_no_exact_noise(
    made: Any, digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from securecluster.privacy.dp import accounting

    def searched(*arguments: Any, **options: Any) -> float:
        raise AssertionError("a search takes seconds")

    monkeypatch.setattr(accounting, "find_noise_for_all", searched)
    monkeypatch.setattr(accounting, "find_skellam_noise", searched)
    assert chosen_for(made, digits.facts)["clip"] == 1.0


@pytest.mark.always
def test_the_noise_of_a_run_is_no_estimate(digits: Federation) -> None:
    for options in ({}, {"dp_unit": "example"}):
        made = FedAvg(target_epsilon=4.0, rounds=5, model="linear", **options)
        settled = made.privacy.settled(made, digits.facts)
        noise = settled.config(digits, "float32")["noise"]
        rough = copy.copy(settled)
        rough.privacy = settled.privacy.for_estimates()
        estimate = rough.config(digits, "float32")["noise"]
        assert estimate != noise and estimate == pytest.approx(noise, rel=0.1)


def test_what_is_so_by_default_is_not_chosen(digits: Federation) -> None:
    # sums are secure anyway, and the network is the linear one under noise
    chosen = chosen_for(Hidden(target_epsilon=8.0, k=2), digits.facts)
    assert chosen == {"clip": 1.0, "rounds": 10}


def test_no_data_are_read(digits: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a default is chosen from data")

    facts = digits.facts
    monkeypatch.setattr(LocalTrainer, "train", read)
    one = chosen_for(CFL(target_epsilon=5.0, rounds=8), facts)
    others = Federation.simulate("digits", clients=12, samples=40, seed=9, scenario=LabelSwap(2))
    assert chosen_for(CFL(target_epsilon=5.0, rounds=8), others.facts) == one


def test_options_that_cannot_work_are_refused_in_their_own_words(digits: Federation) -> None:
    with pytest.raises(UsageError, match="placement distributed"):
        CFL(target_epsilon=4.0, placement="distributed").fit(digits)
    with pytest.raises(UsageError, match="both say how much noise"):
        FedAvg(target_epsilon=4.0, noise=1.0).fit(digits)


@pytest.mark.filterwarnings("ignore:on their own test samples")
def test_a_run_keeps_what_was_chosen_in_its_folder(digits: Federation, tmp_path: Path) -> None:
    made = FedAvg(target_epsilon=20.0, epochs=1)
    fitted = made.fit(digits, SETTINGS, folder=tmp_path / "run")
    # the object that was fitted has the options that it was given
    assert (made.rounds, made.clip) == (40, None)
    chosen = chosen_for(made, digits.facts)
    assert len(fitted.history_) == fitted.result_.method.rounds == chosen["rounds"] < 40
    assert fitted.ledger_.price(made.delta).epsilon <= 20.0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert config["network"]["chosen"] == result["chosen"] == chosen
    assert config["protocol"].items() >= chosen.items()
    again = FedAvg(target_epsilon=20.0, epochs=1).fit(digits, SETTINGS, folder=tmp_path / "run")
    assert again.scores_.tolist() == fitted.scores_.tolist()
    loaded = FedAvg.load(tmp_path / "run")
    assert loaded.rounds == chosen["rounds"]


def test_the_command_says_what_it_chose_and_its_run_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    options = ["--clients", "8", "--samples", "30", "--epochs", "1", "--target-epsilon", "20"]
    assert main(["run", "fedavg", *options, "--transcript", "full", "--out", folder]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    line = "chosen for the target, since not given: --clip 1.0 --aggregation secagg --model linear"
    # before the first round, and in the report
    assert shown.count(line) == 2
    assert shown.index(line) < shown.index("round 1/")
    assert main(["replay", folder]) == 0
    assert main(["report", folder]) == 0
    assert line in " ".join(capsys.readouterr().out.split())
    assert main(["resume", folder]) == 0
