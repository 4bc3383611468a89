"""Runs that go on for more rounds end as runs that had them from the start."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster.cli.main import main
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.folders import run_folder
from securecluster.protocols import CFL, IFCA, RDPCFL, SRFCA, FedAvg, LocalKMeans, OneShot
from securecluster.reports import loading
from securecluster.runs.replay import replay
from securecluster.runtime import run as runtime_run
from securecluster.runtime.run import LAST
from tests.protocols.cases import (
    FULL,
    VARIANTS,
    exhaustive,
    interrupt_after,
    stub_pair_network,
    two_clusters,
    variant,
)

# one short phase of each protocol and way of a run, and all others with --exhaustive
FEW = {
    "cfl", "flhc", "srfca", "oneshot hierarchical", "pacfl", "signature", "nsim", "hidden", "ifca",
    "clove", "cflgp", "flux", "local-kmeans", "random", "fedavg momentum", "finetune", "mrmtl",
    "local",
}  # fmt: skip
# which choose clusters in rounds that follow from the number of all
CASES = [name if name in FEW else exhaustive(name) for name in VARIANTS if name[:6] != "rdpcfl"]
SEEDED = replace(FULL, keys_from_seed=True)
DATA = two_clusters(6, 24)


def small(name: str, rounds: int, **more: Any) -> Any:
    """A variant of so many rounds in all, or so many beyond those that SR-FCA has."""
    if name.startswith("srfca"):
        return variant(name, model="linear", rounds=1, retrain=rounds - 2, **more)
    return variant(name, model="linear", rounds=rounds, **more)


def replays(folder: Path) -> None:
    """Replay a run by its server alone."""
    plan, config = loading.plan_of(folder)
    replay(plan, config, folder)


def same(one: Any, other: Any, keyed: bool = False) -> None:
    """Two runs have the same models, state, labels and history, to the bit.

    Digests and seals in a state are keyed by the configuration that the run began with.
    """
    assert keyed or one.server_state_ == other.server_state_
    assert torch.equal(one.client_models_.values, other.client_models_.values)
    assert one.labels_.tolist() == other.labels_.tolist()
    assert one.history_ == other.history_


def warned(shorter: Any) -> Any:
    """The warning of a method whose beginning depends on the number of rounds."""
    if shorter._unlike_longer(shorter) is None:
        return nullcontext()
    return pytest.warns(SecureClusterWarning, match="and one in one go is another")


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_goes_on_is_one_in_one_go(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("nsim"):
        stub_pair_network(monkeypatch)
    in_one = small(name, 4).fit(DATA, SEEDED)
    small(name, 2).fit(DATA, SEEDED, folder=tmp_path)
    with warned(small(name, 2)):
        go_on = small(name, 4).fit(DATA, SEEDED, folder=tmp_path)
    assert len(go_on.history_) == len(in_one.history_)
    if (
        name.endswith("noise")
        or "signature" in name
        or small(name, 2)._unlike_longer(small(name, 4))
    ):
        return  # noise is drawn under the hash of the configuration
    same(go_on, in_one, keyed=name.startswith("oneshot") or "sealed" in name)
    assert {*in_one.ledger_.events} <= {*go_on.ledger_.events}


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_stopped_run_goes_on_for_more_rounds(stop: int, tmp_path: Path) -> None:
    in_one = small("ifca", 6).fit(DATA, SEEDED)
    with pytest.raises(KeyboardInterrupt):
        small("ifca", 5).fit(DATA, SEEDED, folder=tmp_path, report=interrupt_after(stop))
    with pytest.raises(KeyboardInterrupt):
        small("ifca", 6).fit(DATA, SEEDED, folder=tmp_path, report=interrupt_after(6))
    same(small("ifca", 6).fit(DATA, SEEDED, folder=tmp_path), in_one)


def test_a_run_that_was_stopped_after_its_rounds_goes_on_before_what_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    in_one = small("ifca", 5).fit(DATA, SEEDED)
    with monkeypatch.context() as patch:
        patch.setattr(IFCA, "offered_models", stopped)  # once the last averages are delivered
        with pytest.raises(KeyboardInterrupt):
            small("ifca", 4).fit(DATA, SEEDED, folder=tmp_path)
    assert len(runtime_run.checkpoints(tmp_path)) == 2
    same(small("ifca", 5).fit(DATA, SEEDED, folder=tmp_path), in_one)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "rotation"},
        {"mask": "haar", "participation": 0.5},
        {"aggregation": "secagg"},
        {"clip": 1.0, "noise": 0.8, "dp_unit": "client"},
        {"clip": 1.0, "noise": 0.8, "dp_unit": "example"},
        {"clip": 1.0, "noise": 0.8, "dp_unit": "client", "aggregation": "secagg"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_protected_runs_go_on_with_their_ledger(options: Any, tmp_path: Path) -> None:
    def made(rounds: int) -> FedAvg:
        return FedAvg(model="linear", rounds=rounds, **options)

    in_one = made(3).fit(DATA, FULL)
    short = made(1).fit(DATA, FULL, folder=tmp_path).ledger_.events
    assert made(2).fit(DATA, FULL, folder=tmp_path).ledger_.epsilon <= in_one.ledger_.epsilon
    go_on = made(3).fit(DATA, FULL, folder=tmp_path)
    events = [*go_on.ledger_.events]
    assert events[: len(short)] == short
    assert go_on.ledger_.epsilon == pytest.approx(in_one.ledger_.epsilon, rel=1e-12)
    # keys were drawn anew by every run, and rotations round
    if "noise" not in options:
        apart = go_on.client_models_.values - in_one.client_models_.values
        assert apart.abs().max() < 1e-4
    replays(tmp_path)
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(RunFolderError, match=r"ledger\.jsonl"):
        replays(tmp_path)


def test_a_run_goes_on_twice_and_joins_and_saves_as_any_other(tmp_path: Path) -> None:
    for rounds in (1, 2, 4):
        go_on = small("cfl", rounds).fit(DATA, SEEDED, folder=tmp_path)
    same(go_on, small("cfl", 4).fit(DATA, SEEDED))
    replays(tmp_path)
    same(CFL.load(tmp_path), go_on)
    go_on.join(two_clusters(8, 24).select(["7"]))
    with pytest.raises(UsageError, match="clients have joined the run"):
        small("cfl", 5).fit(DATA, SEEDED, folder=tmp_path)


REFUSED = {
    "fewer": (FedAvg, {}, 1, "rounds was 2 there and is 1 now", RunFolderError),
    "other": (FedAvg, {}, {"rounds": 3, "lr": 0.5}, "lr was", RunFolderError),
    "target": (
        FedAvg, {"target_epsilon": 8.0}, 3, "was found for target_epsilon = 8", UsageError
    ),
    "phase": (LocalKMeans, {"k": 2, "local_rounds": 5}, 6, "cut local_rounds = 5", UsageError),
    "chosen": (RDPCFL, {"k": 2}, 3, "separate clusters were chosen in rounds", UsageError),
    "starts": (IFCA, {"k": 2, "starts": 2}, 8, "2 short starts of 2, and .* 2 of 1", UsageError),
    "inside": (SRFCA, {"refine": 1, "local_rounds": 1}, 3, "rounds was 2", RunFolderError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_on_is_refused_and_stays(name: str, tmp_path: Path) -> None:
    protocol, options, more, sentence, error = REFUSED[name]
    options = {"model": "linear", **options}
    more = more if isinstance(more, dict) else {"rounds": more}
    begun = protocol(**{**options, "rounds": 2}).fit(DATA, FULL, folder=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(error, match=sentence):
        protocol(**{**options, **more}).fit(DATA, FULL, folder=tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    same(protocol.load(tmp_path), begun)


def test_a_run_without_the_state_of_its_last_round_or_with_another_is_refused(
    tmp_path: Path,
) -> None:
    for name in ("lost", "damaged"):
        small("fedavg", 1).fit(DATA, FULL, folder=tmp_path / name)
    clients = tmp_path / "damaged" / LAST / "clients"
    clients.write_bytes(clients.read_bytes()[:-1] + b"x")
    with pytest.raises(RunFolderError, match="clients"):
        small("fedavg", 2).fit(DATA, FULL, folder=tmp_path / "damaged")
    for path in (tmp_path / "lost" / LAST).iterdir():
        path.unlink()
    (tmp_path / "lost" / LAST).rmdir()
    with pytest.raises(RunFolderError, match="holds no state of its last round"):
        small("fedavg", 2).fit(DATA, FULL, folder=tmp_path / "lost")
    if os.name == "posix":
        small("fedavg", 1).fit(DATA, FULL, folder=tmp_path / "kept")
        assert (tmp_path / "kept" / LAST / "clients").stat().st_mode & 0o077 == 0


def test_oneshot_says_what_its_last_round_did(tmp_path: Path) -> None:
    made = {"model": "linear", "tasks": 2, "gps_every": 2}
    OneShot(rounds=1, **made).fit(DATA, FULL, folder=tmp_path)
    with pytest.warns(SecureClusterWarning, match="round 1 was the last, and averaged the common"):
        OneShot(rounds=2, **made).fit(DATA, FULL, folder=tmp_path)
    replays(tmp_path)


def test_the_command_line_goes_on_by_the_same_command_with_more_rounds(
    tmp_path: Path, capsys: Any
) -> None:
    out = str(tmp_path / "run")
    command = ["run", "cfl", "--clients", "6", "--clusters", "2", "--samples", "24"]
    command += ["--model", "linear", "--keys-from-seed", "--out"]
    assert main([*command, out, "--rounds", "2", "--pictures"]) == 0
    assert main([*command, out, "--rounds", "2"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main([*command, out, "--rounds", "4", "--lr", "0.5"]) == 2
    assert "lr was None there and is 0.5 now" in capsys.readouterr().err
    assert main([*command, out, "--rounds", "4"]) == 0
    assert "round   3/4" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "one"), "--rounds", "4"]) == 0
    results = [run_folder.result_of(folder) for folder in (Path(out), tmp_path / "one")]
    for name in ("labels", "score", "bytes", "rounds"):
        if name in results[0]:
            assert results[0][name] == results[1][name]
    for check in ("replay", "report", "resume"):
        assert main([check, out]) == 0
    assert main(["audit", out, "--attack", "label-counts"]) == 0
    assert main([*command, out, "--rounds", "4", "--force"]) == 0
    assert not (tmp_path / "run" / run_folder.LONGER).exists()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["network"]["rounds"] == config["protocol"]["rounds"] == 4
