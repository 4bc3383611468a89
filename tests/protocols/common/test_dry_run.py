"""Runs of stand-ins for clients, by which a run's releases are known before it starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
from fesem import FeSEM
from flexcfl import FirstUpdateClient, FlexCFL

from benchmarks.golden import walks
from securecluster import Federation
from securecluster.errors import UsageError
from securecluster.parties import dry_run
from securecluster.parties.dry_run import run_releases
from securecluster.privacy.dp.ledger import COSTLESS
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    Settings,
    Signature,
)
from securecluster.protocols.authoring import ClusterOnceState, Empty, Run, ServerChannel, protocol
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.training.local_trainer import LocalTrainer

CLIENT: dict[str, Any] = {"clip": 1.0, "target_epsilon": 8.0, "model": "linear", "rounds": 5}
EXAMPLE = {**CLIENT, "dp_unit": "example", "batch_size": 8, "epochs": 2}


def counted(kind: type, federation: Federation, **params: Any) -> dict[tuple[str, float], int]:
    """Return the number of releases of one client by mechanism and noise multiplier."""
    releases = run_releases(kind(**params), federation.facts, len(federation))
    counts: Counter[tuple[str, float]] = Counter()
    for expense, count in releases.single:
        counts[expense.mechanism, round(expense.noise_multiplier, 9)] += count
    for multiplier, count in releases.summed:
        counts["summed", round(multiplier, 9)] += count
    return dict(counts)


# releases of one client in five rounds, as the papers' loops make them
UPDATES: tuple[tuple[type, dict[str, Any], int], ...] = (
    (FedAvg, {}, 5),
    (FedAvg, {"participation": 0.2}, 5),
    (FineTune, {"tune_rounds": 2}, 3),
    (CFL, {}, 5),
    (CFL, {"similarity": "gradient"}, 10),
    (CFL, {"fallback": 0.2}, 6),
    (CFL, {"sketch": 32}, 10),
    (FLHC, {"pre_rounds": 2}, 6),
    # five updates, a choice in each round and at the end
    (IFCA, {"k": 2, "starts": 1}, 11),
    # losses in the first two rounds alone
    (CLoVE, {"k": 2, "cluster_rounds": 2}, 7),
    # the one-shot model, losses, three averages, losses again
    (SRFCA, {"local_rounds": 2, "refine": 1, "rounds": 3, "distance": "loss"}, 1 + 1 + 3 + 1),
    # the layer, the model of two rounds alone, three averages
    (NSIM, {"local_rounds": 2, "walks": walks, "layer": "last"}, 5),
    (LocalKMeans, {"k": 2, "local_rounds": 2}, 4),
    (OneShot, {"tasks": 2}, 6),
    (PACFL, {}, 6),
    (FlexCFL, {"k": 2}, 6),
    (FeSEM, {"k": 2}, 10),
    (Local, {}, 0),
)


@pytest.mark.parametrize(("kind", "params", "releases"), UPDATES)
def test_a_client_releases_as_often_as_the_paper_says(
    kind: type, params: dict[str, Any], releases: int, small: Federation
) -> None:
    found = counted(kind, small, **{**CLIENT, "dp_unit": "client", **params})
    assert sum(found.values()) == releases
    assert set(found) <= {("gaussian", 1.0)}


@pytest.mark.parametrize("clusterer", ["paper", "average"])
def test_splits_by_signatures_ask_for_losses(clusterer: str, small: Federation) -> None:
    params = {**CLIENT, "dp_unit": "client", "signature": "gradient", "clusterer": clusterer}
    without = counted(CFL, small, **params)
    # stand-ins have no clusters that a split by signatures finds
    judged = counted(CFL, small, **params, fallback=0.2)
    assert without["gaussian", 1.0] == 5
    assert judged == {**without, ("gaussian", 1.0): 6}


class AsksFirst(FlexCFL):
    """Asks its first client for another update."""

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        state = super().run_server(net, run)
        net.gather(FirstUpdateClient.pretrain, Empty(), to=net.clients[:1])
        return state


def test_the_client_that_releases_most_counts(small: Federation) -> None:
    assert counted(AsksFirst, small, **CLIENT, k=2) == {("gaussian", 1.0): 7}


def test_trainings_are_counted_with_their_batches(small: Federation) -> None:
    releases = run_releases(FedAvg(**EXAMPLE), small.facts, len(small))
    ((expense, count),) = releases.single
    assert (expense.mechanism, expense.batch, expense.epochs, count) == ("dp-sgd", 8, 2, 5)
    # 20 samples in batches of 8: three steps an epoch, two epochs, five trainings
    assert releases.plan(3.0, 20).steps == ((3.0, 0.4, 30),)
    # one step along the full gradient, four trainings, and choices in a fifth of the rounds
    found = counted(RDPCFL, small, **EXAMPLE, k=2, selection_noise=4.0, selection_share=0.2)
    assert found == {("dp-sgd", 1.0): 5, ("gaussian", 4.0): 1}


def test_two_releases_of_a_signature_have_half_of_its_budget_each(small: Federation) -> None:
    params = {**EXAMPLE, "signature_blocks": "plain", "signature_centre": 0.3}
    found = counted(Signature, small, **params)
    assert found == {("gaussian", round(2**0.5, 9)): 2, ("dp-sgd", 1.0): 5}
    assert counted(Signature, small, **params, signature_releases=1)[("gaussian", 1.0)] == 1


def test_sums_with_shares_of_noise_are_counted_apart(small: Federation) -> None:
    shares = {**CLIENT, "placement": "distributed", "aggregation": "secagg"}
    assert counted(FedAvg, small, **shares) == {("summed", 1.0): 5}
    hidden = Hidden(**shares, k=2, cluster_share=0.5)
    found = run_releases(hidden, small.facts, len(small)).summed
    assert sum(count for _, count in found) == 5 + 4
    # the four sums of clustering have half of the budget, and the five of updates the other half
    assert np.isclose(sum(count / z**2 for z, count in found), 5.0 + 5.0)


@pytest.mark.parametrize("name", ["cfl", "clove", "ifca", "srfca", "signature", "fedavg"])
def test_no_data_and_no_training_are_behind_it(
    name: str, small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cases.variant(name, rounds=2, clip=1.0, target_epsilon=8.0)
    blank = cases.two_clusters(clients=len(small), samples=30, seed=99)

    def trained(*args: Any, **options: Any) -> Any:
        raise AssertionError("somebody trained")

    monkeypatch.setattr(LocalTrainer, "train", trained)
    monkeypatch.setattr(dry_run, "_KNOWN", {})
    first = run_releases(made, small.facts, len(small))
    monkeypatch.setattr(dry_run, "_KNOWN", {})
    assert run_releases(made, blank.facts, len(blank)) == first


def test_a_large_network_has_a_stand_in_where_one_fits(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    trained = dry_run.StandInTrainer.train

    def noted(self: Any, *given: Any, **options: Any) -> Any:
        widths.append(self.model.dimension)
        return trained(self, *given, **options)

    monkeypatch.setattr(dry_run.StandInTrainer, "train", noted)
    large = {**CLIENT, "model": "mlp-200"}
    monkeypatch.setattr(dry_run, "LARGE", 10_000)
    assert counted(FedAvg, small, **large) == {("gaussian", 1.0): 5}
    assert set(widths) == {64 * 10 + 10}
    # a layer of its own that the small network lacks
    widths.clear()
    monkeypatch.setattr(dry_run, "SMALL_NETWORK", "lstm-chars")
    assert counted(FedAvg, small, **{**large, "rounds": 4}) == {("gaussian", 1.0): 4}
    assert min(widths) > 10_000


def test_it_is_found_once_for_equal_runs(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "_KNOWN", {})
    first = run_releases(FedAvg(**CLIENT), small.facts, len(small))
    assert run_releases(FedAvg(**CLIENT), small.facts, len(small)) is first
    assert run_releases(FedAvg(**{**CLIENT, "rounds": 6}), small.facts, len(small)) is not first
    # a cell of a notebook that ran twice
    again = protocol(type("FedAvg", (FedAvg,), {"__module__": FedAvg.__module__}))
    assert run_releases(again(**CLIENT), small.facts, len(small)) is not first


def test_a_choice_of_one_target_is_found_once_for_all_rates_and_seeds(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "_OBSERVED", {})
    monkeypatch.setattr(dry_run, "MOST_OBSERVED", 2)
    options = {**CLIENT, "k": 2}
    first = dry_run.observed(IFCA(**options, lr=0.1), small.facts)
    other_seed = replace(small, seed=small.seed + 1).facts
    assert dry_run.observed(IFCA(**options, lr=4.0), other_seed) is first
    # which is what a run of stand-ins at the other rate shows
    assert dry_run._of_stand_ins(IFCA(**options, lr=4.0), other_seed) == first
    for rounds in (6, 7):
        assert dry_run.observed(IFCA(**{**options, "rounds": rounds}), small.facts) != first
    assert dry_run.observed(IFCA(**options, lr=0.1), small.facts) is not first  # the latest two


@pytest.mark.few(8)
@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", cases.VARIANTS)
def test_no_run_releases_more(name: str, unit: str, small: Federation) -> None:
    try:
        made = cases.variant(name, rounds=3, clip=1.0, noise=0.7, dp_unit=unit, mask="none")
        made.check(len(small))
        fitted = made.fit(small, Settings(keys_from_seed=True))
    except UsageError:
        pytest.skip("no such run")
    foreseen = run_releases(made, small.facts, len(small))
    events = [e for e in fitted.ledger_.events if e.mechanism not in (*COSTLESS, "exact")]
    for client in range(len(small)):
        of_client = [event for event in events if client in event.ids]
        priced = [e for e in of_client if e.mechanism in ("gaussian", "dp-sgd")]
        assert len(priced) <= sum(count for _, count in foreseen.single)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", sorted(set(PROTOCOLS) - {"nsim"}))
def test_no_learning_rate_changes_what_stand_ins_release(name: str, small: Federation) -> None:
    options = {"rounds": 6, "clip": 1.0, "dp_unit": "example", "target_epsilon": 4.0}
    slow, fast = (cases.build(protocol_class(name), **options, lr=lr) for lr in (0.01, 2.0))
    assert dry_run._of_stand_ins(slow, small.facts) == dry_run._of_stand_ins(fast, small.facts)
