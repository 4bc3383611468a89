"""CFL against what the paper and its defaults promise."""

from __future__ import annotations

import logging
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from sklearn.base import clone

from securecluster import Federation, Iid, LabelPermutation, LabelSwap
from securecluster.clustering.bipartition import Bipartition
from securecluster.clustering.noise_robust import SplitEvidence
from securecluster.core import progress
from securecluster.errors import UsageError
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, FedAvg, Local, Settings
from securecluster.protocols.cfl import protocol as cfl
from securecluster.protocols.cfl.parameter_tree import ParameterTree
from securecluster.protocols.cfl.protocol import CFLState
from securecluster.protocols.cfl.split_test import SplitStatistics
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.comparison.evidence import UpdateEvidence


def heard(members: list[int], replied: list[int], **norms: float) -> SplitStatistics:
    """Return statistics of a cluster of whom only some members replied."""
    evidence = UpdateEvidence(replied, torch.zeros(len(replied), 1), list(range(len(replied))))
    return SplitStatistics(0, members, evidence, evidence, **norms)


@pytest.mark.always
# ten seeds: benchmarks/clusters/seeds.py
@pytest.mark.parametrize("seed", cases.seeds(1, of=10))
def test_label_swap_on_digits_is_recovered_exactly(seed: int) -> None:
    fitted = CFL().fit(Federation.simulate("digits", seed=seed))
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]
    before = next(line["accuracy"] for line in fitted.history_ if line["splits"])
    assert np.mean(fitted.accuracy_) > before + 0.1
    splits = [split for line in fitted.history_ for split in line["splits"]]
    theory = fitted.report_fields(fitted.state_)["theory"]
    assert [entry["members"] for entry in theory] == [len(members) for members, _, _ in splits]
    assert all(0 < entry["gamma"] <= 1 and entry["allowed"] > 0.5 for entry in theory)


@pytest.mark.parametrize("seed", cases.seeds(1, of=3))
def test_iid_clients_stay_together(seed: int) -> None:
    fitted = CFL().fit(Federation.simulate("digits", scenario=Iid(), seed=seed))
    assert len(set(fitted.labels_)) == 1


@pytest.mark.parametrize(
    ("p_value", "complete", "significant"),
    [(0.05, True, False), (0.05, False, True), (0.0005, True, True), (0.2, False, False)],
)
def test_a_hint_is_enough_for_a_cluster_of_whom_only_some_replied(
    p_value: float, complete: bool, significant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = SplitEvidence(1.5, p_value)
    monkeypatch.setattr(cfl.noise_robust, "evidence_for_split", lambda *_: evidence)
    replied = [0, 1, 2, 3] if complete else [0, 1, 2]
    statistics = heard([0, 1, 2, 3], replied)
    assert CFL()._significant(statistics, np.eye(4), 0) is significant
    assert statistics.p_value == p_value


def test_a_split_test_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    alpha = np.where(np.equal.outer(np.arange(12) % 2, np.arange(12) % 2), 0.9, -0.9)
    np.fill_diagonal(alpha, 1.0)
    clients = list(range(12))
    statistics = heard(clients, clients)
    statistics.cluster = 3
    with caplog.at_level(logging.INFO, progress.logger.name):
        assert CFL()._significant(statistics, alpha, 0)
    assert caplog.messages[0] == "split test of cluster 3, 12 clients: draw 1 of 999"
    assert len(caplog.messages) == 999


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize("clusters", [2, cases.exhaustive(3), 5])
def test_other_numbers_of_clusters_are_found_without_being_told(clusters: int) -> None:
    fitted = CFL().fit(Federation.simulate("digits", scenario=LabelSwap(clusters=clusters), seed=0))
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]


@pytest.mark.exhaustive
def test_many_small_clusters_are_found_though_both_halves_of_a_split_hold_several() -> None:
    kind = LabelPermutation(clusters=6)
    federation = Federation.simulate("digits", scenario=kind, clients=24, samples=40, seed=2)
    fitted = CFL(rounds=25).fit(federation, Settings(transcript="none"))
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]
    tested = [
        statistics["p_value"]
        for line in fitted.history_
        for statistics in line["split_tests"]
        if statistics["p_value"] is not None
    ]
    split = [
        statistics["p_value"]
        for line in fitted.history_
        for statistics in line["split_tests"]
        if statistics["split"]
    ]
    assert split == [1 / 1000] * 5
    assert max(tested) > 0.001


def test_four_clients_of_one_distribution_stay_together() -> None:
    for seed in range(3):
        federation = Federation.simulate("digits", scenario=Iid(), clients=4, samples=70, seed=seed)
        fitted = CFL().fit(federation, Settings(transcript="none"))
        assert set(fitted.labels_) == {0}
        longest = np.maximum.accumulate(
            [line["split_tests"][0]["max_norm"] for line in fitted.history_]
        )
        content = [
            line["split_tests"][0]["max_norm"] <= 0.25 * most
            for line, most in zip(fitted.history_, longest, strict=True)
        ]
        assert any(content), (
            "the updates of few clients shrink as they learn their samples by heart"
        )
        assert all(
            line["split_tests"][0]["p_value"] is None
            for line, still in zip(fitted.history_, content, strict=True)
            if still
        )


def test_of_two_clients_nothing_is_separated(tmp_path: Path) -> None:
    federation = cases.two_clusters(2, 40)
    fitted = CFL(rounds=20, min_size=2, eps1=1.0, eps2=0.01).fit(
        federation, folder=tmp_path / "run"
    )
    split_tests = [statistics for line in fitted.history_ for statistics in line["split_tests"]]
    assert {statistics["p_value"] for statistics in split_tests} == {1.0}
    assert {statistics["evidence"] for statistics in split_tests} == {None}
    assert "Infinity" not in (tmp_path / "run" / "history.jsonl").read_text()


def test_absolute_norms_split_or_never_split(small: Federation) -> None:
    eager = CFL(criterion="absolute", eps1=100, eps2=1e-3, gamma_max=0.0, rounds=8).fit(small)
    never = CFL(criterion="absolute", eps1=1e-9, eps2=1e-3, rounds=3).fit(small)
    assert len(set(eager.labels_)) > 1
    assert len(set(never.labels_)) == 1


def test_gamma_max_rejects_splits(small: Federation) -> None:
    fitted = CFL(criterion="absolute", eps1=100, eps2=1e-3, gamma_max=0.999, rounds=3).fit(small)
    assert len(set(fitted.labels_)) == 1


def test_clusters_below_the_minimum_size_are_not_split(small: Federation) -> None:
    fitted = CFL(
        criterion="absolute", eps1=100, eps2=1e-3, gamma_max=0.0, min_size=4, rounds=6
    ).fit(small)
    for line in fitted.history_:
        assert all(len(members) >= 4 for members, _, _ in line["splits"])


def test_both_halves_start_from_the_parents_model(small: Federation) -> None:
    fitted = CFL(criterion="absolute", eps1=100, eps2=1e-3, gamma_max=0.0, rounds=1).fit(small)
    assert len(set(fitted.labels_)) == 2
    models = fitted.client_models_.values
    assert torch.equal(models, models[:1].expand_as(models))


def test_both_averages_are_those_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        str(n): (rng.random((n, 4), dtype=np.float32), rng.integers(0, 3, n)) for n in (5, 10, 25)
    }
    federation = Federation.from_arrays(arrays, seed=0)
    sizes = torch.tensor([len(s.y) for s in federation.shards], dtype=torch.float64)
    settings = Settings(dtype="float64", transcript="full")
    for average, weight in (("uniform", torch.ones(3, dtype=torch.float64)), ("weighted", sizes)):
        fitted = CFL(mask="none", model="linear", rounds=1, average=average).fit(
            federation, settings
        )
        entry = next(k for k, e in enumerate(fitted.transcript_.entries) if e.method == "train")
        delta = fitted.transcript_.content(entry)[1].reply.delta.values
        start = build_client(CFL(model="linear"), federation, settings).client.cohort.start
        expected = start + (weight[:, None] * delta).sum(0) / weight.sum()
        torch.testing.assert_close(fitted.client_models_.values[0], expected, rtol=0, atol=1e-12)


def test_fedavg_averages_by_sample_count_and_equals_weighted_cfl_without_splits() -> None:
    federation = Federation.simulate("digits", scenario=Iid(), clients=4, samples=30, seed=0)
    settings = Settings(dtype="float64")
    weighted = CFL(
        mask="none", average="weighted", criterion="absolute", eps1=1e-12, eps2=1, rounds=4
    ).fit(federation, settings)
    fedavg = FedAvg(rounds=4).fit(federation, settings)
    torch.testing.assert_close(
        weighted.client_models_.values, fedavg.client_models_.values, rtol=0, atol=1e-9
    )


def test_local_releases_nothing_and_its_epsilon_is_zero(small: Federation) -> None:
    fitted = Local(rounds=2).fit(small)
    assert fitted.ledger_.epsilon == 0
    assert CFL(rounds=1).fit(small).ledger_.epsilon == float("inf")


def test_estimator_conventions(small: Federation) -> None:
    copy = clone(CFL(rounds=2, eps1=0.2))
    assert copy.get_params() == CFL(rounds=2, eps1=0.2).get_params()
    assert copy.set_params(rounds=1).fit(small) is copy
    with pytest.raises(UsageError, match="did you mean 'eps1'"):
        copy.set_params(epsilon1=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0}, {"epochs": 0}, {"batch_size": 0}, {"mask": "rot"}, {"model": "cnn"},
        {"criterion": "x"}, {"average": "x"}, {"gamma_max": 1.0}, {"participation": 0.0},
        {"rounds": 0}, {"optimizer": "x"}, {"momentum": 1.0},
        {"optimizer": "adam", "momentum": 0.5},
    ],
)  # fmt: skip
def test_wrong_hyper_parameters_are_refused_in_one_sentence(
    wrong: dict[str, object], small: Federation
) -> None:
    with pytest.raises(UsageError) as caught:
        CFL(**wrong).fit(small)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_identical_clients_and_lone_clients_are_refused() -> None:
    x, y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2
    with pytest.raises(UsageError, match="identical data"):
        CFL().fit(
            Federation.from_arrays(
                {"a": (x, y), "b": (x, y)}, test={"a": (x, y), "b": (x, y)}, seed=0
            )
        )
    with pytest.raises(UsageError, match="at least two clients"):
        CFL().fit(Federation.from_arrays({"a": (x, y)}, seed=0))


def test_clients_without_updates_are_no_trouble() -> None:
    """Zero updates (a learning rate too small for float32 to see) have no direction; nothing
    divides by zero.
    """
    x, y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2
    federation = Federation.from_arrays({str(k): (x + k, y) for k in range(4)}, seed=0)
    fitted = CFL(lr=1e-30, rounds=2).fit(federation)
    assert len(set(fitted.labels_)) == 1


def test_the_relative_criterion_measures_norms_by_the_largest_ones() -> None:
    method = CFL(eps1=0.4, eps2=0.5)
    state = CFLState([0, 0], PendingUpdates.start(2, fresh=False), ParameterTree.start(2))
    state.longest = 10.0
    for mean_norm, max_norm, stationary, incongruent in (
        (3.0, 8.0, True, True),
        (3.0, 4.0, False, False),
        (0.1, 0.2, False, False),
        (0.05, 5.0, True, False),
    ):
        found = heard([0, 1], [0, 1], mean_norm=mean_norm, max_norm=max_norm)
        assert method._stationary(found) is stationary
        assert method._incongruent(state, found) is incongruent


@pytest.mark.parametrize(("gamma_max", "split"), [(0.7, True), (0.71, False)])
def test_halves_that_are_orthogonal_allow_noise_below_the_root_of_a_half(
    gamma_max: float, split: bool
) -> None:
    state = CFLState([0, 0], PendingUpdates.start(2, fresh=False), ParameterTree.start(2))
    found = heard([0, 1], [0, 1])
    CFL(gamma_max=gamma_max)._accept(state, found, Bipartition((0,), (1,), 0.0), np.eye(2))
    assert found.sides == (([0], [1]) if split else None)
