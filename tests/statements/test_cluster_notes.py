"""Warnings of clusters that a user should not trust: each is said where it should be, and nowhere
else.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation, Iid, LabelPermutation, LabelSwap
from securecluster.cli.main import main
from securecluster.errors import SecureClusterWarning
from securecluster.protocols import CFL, FLHC, IFCA, CLoVE, FedAvg, Hidden, Settings, Signature
from securecluster.statements import cluster_notes
from securecluster.statements.cluster_differences import alike, clients_differ
from securecluster.training.local_trainer import LocalTrainer

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")


def digits(scenario: Any, clients: int, samples: int) -> Federation:
    return Federation.simulate(
        "digits", scenario=scenario, clients=clients, samples=samples, seed=0
    )


def test_a_gain_counts_where_it_is_large_and_beyond_chance() -> None:
    before = np.full(8, 0.6)
    found = clients_differ(before, before + 0.2)
    assert found is not None and (found.before, found.after) == pytest.approx((0.6, 0.8))
    assert clients_differ(before, before + 0.02) is None, "small"
    # a mean of 0.1 with a standard error of 0.07
    scattered = before + np.array([0.4, -0.2, 0.3, -0.1, 0.35, -0.15, 0.3, -0.1])
    assert clients_differ(before, scattered) is None, "chance"
    assert clients_differ(before[:1], before[:1] + 0.3) is None, "one client has no error"
    assert clients_differ(np.full(3, NAN), np.ones(3)) is None, "nobody holds samples out"
    partly = np.array([0.6, 0.6, 0.6, NAN])
    assert clients_differ(partly, np.array([0.9, 0.9, 0.9, NAN])) is not None


def test_two_clusters_look_like_one_where_each_does_as_well_with_the_others_model() -> None:
    labels = [0] * 4 + [1] * 4 + [2] * 4
    own = np.full((3, 12), 0.9)
    own[2, :8] = 0.5  # the third cluster is another task
    own[:2, 8:] = 0.5
    found = alike(labels, own)
    assert found is not None and found[:2] == (0, 1)
    own[0, 4:8] = 0.7  # and now so is the second
    own[1, :4] = 0.7
    assert alike(labels, own) is None
    # four clients a cluster that scatter by 0.2 say nothing
    noisy = np.full((2, 8), 0.8)
    noisy[0, :4] += [0.2, -0.2, 0.2, -0.2]
    assert alike([0] * 4 + [1] * 4, noisy) is None
    assert alike([0, 0, 0], np.ones((1, 3))) is None


def test_one_cluster_of_clients_that_differ_says_by_how_much() -> None:
    federation = digits(LabelPermutation(4), 12, 80)
    # too few clients to be split
    fitted = CFL(rounds=30, min_size=13).fit(federation)
    assert set(fitted.labels_) == {0} and fitted.warning_ is not None
    plain = float(np.nanmean(fitted.scores_))
    assert "no split was found" in fitted.warning_ and "they differ" in fitted.warning_
    assert f"from {plain:.3f} to" in fitted.warning_ and "tune_rounds=3" in fitted.warning_
    tuned = CFL(rounds=30, min_size=13, tune_rounds=3).fit(federation)
    assert tuned.warning_ is not None
    after = float(np.nanmean(tuned.scores_))
    assert f"from {plain:.3f} to {after:.3f}" in tuned.warning_


def test_signatures_that_miss_clusters_without_noise_say_that_clients_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def together(self: Signature, signatures: Any, seed: int) -> list[int]:
        return [0] * len(signatures)

    monkeypatch.setattr(Signature, "cluster", together)
    federation = digits(LabelSwap(2), 8, 100)
    fitted = Signature(rounds=30).fit(federation)
    assert "and they differ: training alone raises" in str(fitted.warning_)


def test_few_samples_a_client_are_named() -> None:
    fitted = FLHC(rounds=30).fit(digits(LabelSwap(4), 48, 12))
    assert set(fitted.labels_) == {0} and fitted.warning_ is not None
    assert "12 samples of 10 classes" in fitted.warning_
    assert "are few to read clusters from" in fitted.warning_


@pytest.mark.parametrize(
    ("labels", "smallest", "named"),
    [
        ([0, 1, 1, 1, 1, 1], 20, "a (16), where the median client has 64"),
        ([0, 1, 1, 1, 1, 1], 45, None),  # not so few beside the others
        ([0, 0, 1, 1, 1, 1], 20, None),  # not alone
        ([0, 1, 2, 3, 4, 5], 20, None),  # everybody is
    ],
)
def test_a_client_that_few_samples_put_apart_is_named(
    labels: list[int], smallest: int, named: str | None
) -> None:
    draw = np.random.default_rng(0)
    clients = {
        name: (draw.normal(size=(size, 4)), np.arange(size) % 10)
        for name, size in zip("abcdef", (smallest, 80, 80, 80, 160, 160), strict=True)
    }
    said = cluster_notes._lone_text(labels, Federation.from_arrays(clients, seed=0))
    assert (said is None) == (named is None)
    assert named is None or named in str(said)


@pytest.mark.parametrize("method", [Hidden, CLoVE])
def test_a_number_of_clusters_that_cuts_one_is_named(method: Any) -> None:
    fitted = method(k=4, rounds=30).fit(digits(Iid(), 12, 80))
    assert len(set(fitted.labels_)) > 1 and fitted.warning_ is not None
    assert "look like one" in fitted.warning_ and "smaller number" in fitted.warning_


def test_a_number_of_clusters_at_its_ceiling_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = digits(LabelSwap(2), 12, 60)
    params: dict[str, Any] = {"rounds": 30, "model": "linear", "epochs": 1}
    made = Signature(signature_noise=1e-3, signature_blocks="plain", **params)
    group = type(made.signatures)
    assert made.signatures.most_clusters(made, made.config(federation, "float32")) == 13
    monkeypatch.setattr(group, "most_clusters", lambda self, method, config: 2)
    fitted = Signature(signature_noise=0.3, **params).fit(federation)
    assert len(set(fitted.labels_)) >= 2 and fitted.warning_ is not None
    assert "ceiling of 2" in fitted.warning_ and "give it where it is known (k)" in fitted.warning_


def test_a_told_number_and_exact_signatures_have_no_ceiling() -> None:
    federation = digits(LabelSwap(2), 12, 60)
    for params in ({"k": 2, "signature_noise": 1.0}, {}):
        made = Signature(**params)
        assert made.signatures.most_clusters(made, made.config(federation, "float32")) is None
    made = CFL()
    assert made.signatures.most_clusters(made, made.config(federation, "float32")) is None


@pytest.mark.parametrize("method", [CFL, FLHC, Signature])
def test_ordinary_runs_say_nothing(method: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecureClusterWarning)
        for federation in (digits(LabelSwap(4), 12, 80), digits(Iid(), 12, 80)):
            fitted = method(rounds=30).fit(federation)
            assert fitted.warning_ is None and fitted.agreement_["ari"] == 1


def test_a_method_that_looks_for_no_clusters_is_not_warned_of_clusters_that_it_missed() -> None:
    assert FedAvg(rounds=10).fit(digits(LabelSwap(4), 12, 80)).warning_ is None


def test_under_noise_no_further_sample_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = digits(LabelSwap(4), 12, 60)
    reads: list[int] = []
    scores = LocalTrainer.scores

    def counting(self: LocalTrainer, *arguments: Any) -> Any:
        reads.append(1)
        return scores(self, *arguments)

    monkeypatch.setattr(LocalTrainer, "scores", counting)
    params: dict[str, Any] = {"rounds": 30, "model": "linear", "epochs": 1}
    fitted = FLHC(clip=1.0, noise=2.0, threshold=1e9, **params).fit(federation)
    # one look a round, and one at the end
    assert len(reads) == 31 and fitted.warning_ is not None
    assert "they differ" not in fitted.warning_ and "samples of" not in fitted.warning_
    reads.clear()
    FLHC(threshold=1e9, **params).fit(federation)
    assert len(reads) == 32


def test_terminal_and_result_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    line = "run flhc --data digits --clients 48 --samples 24 --model linear --epochs 1 --rounds 30"
    assert main([*line.split(), "--threshold", "1e9", "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    said = result["warning"]
    assert "one cluster was found of all 48 clients" in said
    printed = capsys.readouterr()
    shown = " ".join((printed.out + printed.err).split())
    assert " ".join(said.split()) in shown or "one cluster was found" in shown


def private(method: Any, federation: Federation, **options: Any) -> str | None:
    """Return what a run with noise, of the unit example, says in the end."""
    given: dict[str, Any] = {"dp_unit": "example", "model": "linear", "rounds": 12, **options}
    said: str | None = method(**given).fit(federation, Settings(keys_from_seed=True)).warning_
    return said


def test_after_a_private_run_noise_is_named_where_the_check_took_clusters_for_lost() -> None:
    drowned: dict[str, Any] = {"dp_unit": "client", "clip": 1.0, "noise": 0.3, "epochs": 1}
    federation = digits(LabelSwap(4), 12, 60)
    one = private(FLHC, federation, threshold=1e9, **drowned)
    assert one is not None and "one cluster" in one
    assert "noise is the likeliest reason, since the power check took clusters for lost" in one
    several = private(IFCA, federation, k=4, starts=1, **{**drowned, "noise": 0.2})
    assert several is not None and "most likely of noise alone" in several


def test_after_a_private_run_few_samples_are_named_where_noise_is_hardly_the_reason() -> None:
    said = private(FLHC, digits(LabelSwap(4), 40, 12), clip=1.0, noise=0.05, pre_rounds=5)
    assert said is not None and "noise" not in said
    assert (
        "too few samples are the likeliest reason (12 samples of 10 classes, a client's median)"
        in said
    )


def test_after_a_private_run_small_clusters_of_few_samples_are_named() -> None:
    federation = digits(LabelSwap(4), 40, 12)
    options: dict[str, Any] = {"clip": 1.0, "noise": 0.05, "pre_rounds": 5, "threshold": 0.01}
    said = private(FLHC, federation, **options)
    assert said is not None and "have fewer than 4 clients on average" in said
    assert "too few samples are the likeliest reason (12 samples" in said
    enough = private(FLHC, digits(LabelSwap(4), 12, 80), **options)
    assert enough is not None and "too few samples" not in enough


def test_after_a_private_run_one_cluster_by_signatures_has_its_reason() -> None:
    federation = digits(Iid(), 12, 80)
    options: dict[str, Any] = {"clip": 1.0, "noise": 0.3}
    options |= {"signature": "gradient", "signature_noise": 0.3}
    said = private(CFL, replace(federation, truth=None), **options)
    assert said is not None and "one cluster was found of all 12 clients" in said
    assert "needs fewer; noise and samples" in said
    # where one is right, and where a method looks for none, nothing is said
    assert private(CFL, federation, **options) is None
    assert private(FedAvg, replace(federation, truth=None), clip=1.0, noise=0.3) is None


def test_after_a_private_run_no_clusters_are_the_reason_where_nothing_else_is() -> None:
    federation = replace(digits(Iid(), 12, 80), truth=None)
    said = private(FLHC, federation, clip=1.0, noise=0.3, pre_rounds=5, threshold=1e9)
    assert said is not None and "there may be no other clusters, or some that sparse" in said
    # numbers of samples are private where whole clients are, and nothing is said of them
    unknown = private(
        FLHC, federation, clip=1.0, noise=0.001, dp_unit="client", pre_rounds=5, threshold=1e9
    )
    assert unknown is not None
    assert "there may be no clusters, or too few samples to tell them" in unknown


def test_after_a_private_run_doubt_is_said_as_doubt() -> None:
    said = private(
        FLHC, digits(LabelSwap(4), 12, 60), clip=1.0, noise=0.1, dp_unit="client", threshold=1e9
    )
    assert said is not None
    assert "noise may be the reason: the power check was in doubt about clusters" in said


def test_after_a_private_run_that_found_its_clusters_nothing_is_said() -> None:
    federation = digits(LabelPermutation(2), 12, 80)
    assert private(FLHC, federation, clip=1.0, noise=0.1, pre_rounds=5) is None


def test_a_private_run_at_chance_says_that_training_was_lost() -> None:
    said = private(FedAvg, digits(Iid(), 8, 20), clip=1.0, noise=10.0, dp_unit="client", epochs=1)
    assert said is not None and "no better than chance" in said
    assert "noise is the likeliest reason, since the power check took training for lost" in said
