"""Runs that start from the models of an earlier one, and are priced with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import load
from securecluster.cli.main import main
from securecluster.errors import RunFolderError, UsageError
from securecluster.folders import run_folder
from securecluster.privacy.dp.ledger import Ledger
from securecluster.protocols import CFL, IFCA, CLoVE, FedAvg, Local, RandomClusters
from securecluster.reports import loading
from securecluster.results.saving import EARLIER
from securecluster.runs.replay import replay
from tests.protocols.cases import FULL, interrupt_after, two_clusters

DATA = two_clusters(6, 24)
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 0.9, "dp_unit": "client"}
EARLIER_RUNS: dict[str, Any] = {
    "one": FedAvg(model="linear", rounds=2).fit(DATA, FULL),
    "two": RandomClusters(k=2, model="linear", rounds=1, mask="none").fit(DATA, FULL),
    "noisy": FedAvg(model="linear", rounds=2, **NOISE).fit(DATA, FULL),
}


def theta(run: Any) -> torch.Tensor:
    """The vector that a run's clients start from."""
    return run.network_.initial()


def of(state: Any) -> torch.Tensor:
    """A linear network's state as a vector."""
    return torch.cat([value.flatten() for value in state.values()])


def replays(folder: Path) -> None:
    """Replay a run by its server alone."""
    plan, config = loading.plan_of(folder)
    replay(plan, config, folder)


def test_clients_start_from_the_one_model_or_that_of_a_cluster(tmp_path: Path) -> None:
    one, two = EARLIER_RUNS["one"], EARLIER_RUNS["two"]
    for start, expected in ((one, one.models_[0]), ((two, 1), two.models_[1])):
        run = FedAvg(model="linear", rounds=1, lr=1e-12, start=start).fit(DATA, FULL)
        assert torch.equal(theta(run), of(expected))
        assert torch.allclose(of(run.models_[0]), of(expected))
    # as one whose module has these weights
    module = one.module_of(cluster=0)
    by_module = CFL(model=module, rounds=2).fit(DATA, FULL)
    by_start = CFL(model="linear", rounds=2, start=one).fit(DATA, FULL)
    assert torch.equal(by_module.client_models_.values, by_start.client_models_.values)


@pytest.mark.parametrize("protocol", [IFCA, CLoVE])
def test_methods_of_k_models_start_from_k(protocol: Any) -> None:
    two = EARLIER_RUNS["two"]
    made: dict[str, Any] = {"k": 2, "model": "linear", "rounds": 1, "lr": 1e-12, "start": two}
    if protocol is IFCA:
        made |= {"starts": 1}
    run = protocol(**made).fit(DATA, FULL)
    models = torch.stack([of(state) for state in two.models_])
    apart = (run.client_models_.values[:, None] - models[None]).abs().amax(2)
    assert (apart.min(1).values < 1e-6).all()


def test_both_runs_are_priced_together(tmp_path: Path, capsys: Any) -> None:
    noisy = EARLIER_RUNS["noisy"]
    later = DATA.select(["3", "4", "5", "0"])
    folder = tmp_path / "run"
    run = FedAvg(model="linear", rounds=3, start=noisy, **NOISE).fit(later, FULL, folder=folder)
    union = Ledger.union(noisy.ledger_, run.ledger_)
    fresh = FedAvg(model="linear", rounds=5, **NOISE).fit(DATA, FULL).ledger_
    assert union.epsilon == pytest.approx(fresh.epsilon, rel=1e-12)
    told = run_folder.result_of(folder)["privacy"]
    assert told["together"]["epsilon"] == pytest.approx(union.epsilon, rel=1e-12)
    assert told["together"]["clients"] == 4 and told["epsilon"] == run.ledger_.epsilon
    assert f"both runs together cost ε = {union.epsilon:.4g}" in told["together"]["sentence"]
    for command in ("replay", "report", "resume"):
        assert main([command, str(folder)]) == 0
    assert "both runs together" in " ".join(capsys.readouterr().out.split())
    # a third one has the price of all three
    third = FedAvg(model="linear", rounds=1, start=folder, **NOISE).fit(DATA, FULL)
    assert third.earlier.ledger.epsilon == pytest.approx(union.epsilon, rel=1e-12)
    six = FedAvg(model="linear", rounds=6, **NOISE).fit(DATA, FULL).ledger_
    assert third.earlier.together(third.ledger_, 1e-5)[0].epsilon == pytest.approx(six.epsilon)


def test_a_run_in_a_folder_is_resumed_goes_on_and_is_loaded(tmp_path: Path) -> None:
    def made(rounds: int, start: Any = EARLIER_RUNS["one"]) -> FedAvg:
        return FedAvg(model="linear", rounds=rounds, start=start)

    in_one = made(3).fit(DATA, FULL)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        made(2).fit(DATA, FULL, folder=folder, report=interrupt_after(1))
    assert main(["resume", str(folder), "--quiet"]) == 0
    go_on = made(3).fit(DATA, FULL, folder=folder)
    assert torch.equal(go_on.client_models_.values, in_one.client_models_.values)
    replays(folder)
    assert main(["audit", str(folder), "--attack", "label-counts"]) == 0
    loaded = load(folder)
    assert torch.equal(theta(loaded), theta(in_one))
    loaded.save(tmp_path / "saved")
    assert torch.equal(theta(load(tmp_path / "saved")), theta(in_one))
    with pytest.raises(RunFolderError, match="another configuration"):
        made(3, EARLIER_RUNS["noisy"]).fit(DATA, FULL, folder=folder)
    other = made(1, EARLIER_RUNS["noisy"]).fit(DATA, FULL, folder=tmp_path / "other")
    assert other.earlier is not None
    (folder / EARLIER).write_bytes((tmp_path / "other" / EARLIER).read_bytes())
    with pytest.raises(RunFolderError, match="earlier"):
        replays(folder)


def test_a_mask_that_hid_the_models_is_said_to_hide_them_no_more() -> None:
    from securecluster.statements.privacy_section import section

    masked = CFL(model="linear", rounds=1).fit(DATA, FULL)
    assert masked.mask != "none"
    run = FedAvg(model="linear", rounds=1, start=masked).fit(DATA, FULL)
    assert (
        "hid these models from the server, which has them now"
        in (section(run.result_)["together"]["sentence"])
    )
    assert section(run.result_)["together"]["epsilon"] is None
    assert math.isinf(run.ledger_.epsilon)


def test_what_cannot_start_a_run_is_refused(tmp_path: Path) -> None:
    one, two, noisy = EARLIER_RUNS.values()
    alone = Local(model="linear", rounds=1).fit(DATA, FULL)
    cases: list[tuple[Any, str]] = [
        (lambda: FedAvg(start=3), "start is int: give a fitted protocol or the folder"),
        (lambda: FedAvg(start=tmp_path), "holds no fitted protocol"),
        (lambda: FedAvg(start=(one, 1)), "there is no cluster 1: the earlier run has 0 to 0"),
        (lambda: FedAvg(start=alone), "trained alone, and nobody has seen their models"),
        (lambda: FedAvg(model="linear", start=two).fit(DATA), "ended with 2 models, and fedavg"),
        (lambda: IFCA(model="linear", k=3, start=two).fit(DATA), "ifca starts from 3.*or k=2"),
        (lambda: FedAvg(model="mlp", start=one).fit(DATA), "are of another network"),
        (
            lambda: FedAvg(model="linear", start=noisy, clip=1.0, noise=1.0, dp_unit="example").fit(
                DATA
            ),
            "protects the unit client, and this one the unit example",
        ),
    ]
    for start, sentence in cases:
        with pytest.raises((UsageError, RunFolderError), match=sentence):
            start()
