"""`fit(folder=…)` from Python: the same run folders as the command line's, with the same checks."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import SMALL_FEDERATION

from securecluster import Dirichlet, Federation, Inversion, LabelSwap, Pathological, Rotation
from securecluster.cli.main import main
from securecluster.data.scenarios import Combined
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UsageError
from securecluster.protocols import CFL, FLHC, ClusteringProtocol, FedAvg, Settings
from securecluster.reports import loading
from securecluster.training.local_trainer import LocalTrainer

FULL = Settings(transcript="full", threads=1)


class StoppedError(Exception):
    pass


def data(seed: int, samples: int = 20) -> Federation:
    """Four clients with random samples."""
    draw = np.random.default_rng(seed)
    clients = {
        f"site-{k}": (draw.random((samples, 4)), draw.integers(0, 2, samples)) for k in range(4)
    }
    return Federation.from_arrays(clients, classes=2, seed=0)


def made(**params: Any) -> FedAvg:
    return FedAvg(**({"model": "linear", "rounds": 4, "epochs": 1} | params))


def stop(line: dict[str, Any]) -> None:
    if line["round"] == 2:
        raise StoppedError


def stopped(folder: Path, federation: Federation, settings: Settings = FULL) -> None:
    with pytest.raises(StoppedError):
        made().fit(federation, settings, folder=folder, report=stop)


def models(fitted: ClusteringProtocol) -> torch.Tensor:
    found: torch.Tensor = fitted.client_models_.values
    return found


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_on_other_data_is_never_gone_on_with(ended: bool, tmp_path: Path) -> None:
    if ended:
        made().fit(data(1), FULL, folder=tmp_path)
    else:
        stopped(tmp_path, data(1))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for other in (data(2), data(1, samples=40)):
        with pytest.raises(RunFolderError, match=r"another configuration \(it ran on other data\)"):
            made().fit(other, FULL, folder=tmp_path)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert torch.equal(
        models(made().fit(data(1), FULL, folder=tmp_path)), models(made().fit(data(1), FULL))
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            Settings(transcript="full", threads=1, dropout=0.5),
            "dropout was 0.0 there and is 0.5 now",
        ),
        (Settings(transcript="sizes", threads=1), "transcript was 'full' there and is 'sizes' now"),
        (Settings(transcript="full", threads=2), "threads was 1 there and is 2 now"),
        (Settings(transcript="full", threads=1, target=0.5), "target was 0.99 there"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_other_settings_are_refused_by_name(
    ended: bool, settings: Settings, said: str, tmp_path: Path
) -> None:
    if ended:
        made().fit(data(1), FULL, folder=tmp_path)
    else:
        stopped(tmp_path, data(1))
    with pytest.raises(RunFolderError, match=f"another configuration .*{said}"):
        made().fit(data(1), settings, folder=tmp_path)


def test_settings_that_are_left_open_are_those_of_the_run(tmp_path: Path) -> None:
    stopped(tmp_path, data(1))
    resumed = made().fit(data(1), Settings(transcript="full"), folder=tmp_path)
    assert resumed.kept_.learned.settings.threads == 1
    assert torch.equal(models(resumed), models(made().fit(data(1), FULL)))


def test_a_run_that_ended_is_loaded_and_nobody_trains_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made().fit(data(1), FULL, folder=tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("somebody trains")

    monkeypatch.setattr(LocalTrainer, "train", refuse)
    again = made().fit(data(1), FULL, folder=tmp_path)
    assert torch.equal(models(again), models(first))
    assert again.history_ == first.history_
    assert again.transcript_.entries == first.transcript_.entries
    assert again.transcript_.totals() == again.bytes_ == first.bytes_
    assert again.ledger_.events == first.ledger_.events


@pytest.mark.always
@pytest.mark.usefixtures("pictures")
def test_what_fit_leaves_is_a_whole_run_folder(
    small: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deep" / "run"
    fitted = CFL(rounds=3).fit(small, Settings(transcript="full"), folder=str(folder))
    for name in (
        "config.json",
        "result.json",
        "manifest.json",
        "history.jsonl",
        "models.safetensors",
    ):
        assert (folder / name).is_file(), name
    assert not list(folder.glob("*.png")), "pictures are drawn where they are asked for"
    result = json.loads((folder / "result.json").read_text())
    assert result["labels"] == [int(c) for c in fitted.labels_]
    assert result["names"] == list(small.names)
    assert main(["replay", str(folder)]) == 0
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 0
    assert "is complete" in capsys.readouterr().out
    for name in ("accuracy.png", "similarity.png"):
        assert (folder / name).is_file(), name
    loaded = CFL.load(str(folder))
    assert torch.equal(models(loaded), models(fitted))
    assert loaded.transcript_.entries == fitted.transcript_.entries
    assert loaded.transcript_.content(0)[0].method == fitted.transcript_.content(0)[0].method


def test_a_run_on_data_from_python_is_not_gone_on_with_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, data(1))
    assert main(["resume", str(tmp_path)]) == 2
    assert "go on there with fit(federation, folder=...)" in capsys.readouterr().err
    made().fit(data(1), FULL, folder=tmp_path)
    assert main(["resume", str(tmp_path), "--quiet"]) == 0


def test_a_module_of_ones_own_goes_on_from_python(
    small: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def module() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    with pytest.raises(StoppedError):
        made(model=module()).fit(small, FULL, folder=tmp_path, report=stop)
    resumed = made(model=module()).fit(small, FULL, folder=tmp_path)
    assert torch.equal(models(resumed), models(made(model=module()).fit(small, FULL)))
    assert torch.equal(models(FedAvg.load(tmp_path, model=module())), models(resumed))
    for command in ("replay", "resume"):
        assert main([command, str(tmp_path)]) == 2
        assert "objects of your own (model)" in capsys.readouterr().err


def test_a_folder_is_written_by_one_fit_at_a_time(tmp_path: Path) -> None:
    def start_another(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            made().fit(data(1), FULL, folder=tmp_path)

    with pytest.raises(RunFolderError, match="another process"):
        made().fit(data(1), FULL, folder=tmp_path, report=start_another)
    assert len(made().fit(data(1), FULL, folder=tmp_path).history_) == 4


def test_another_protocol_in_the_folder_is_said(small: Federation, tmp_path: Path) -> None:
    made().fit(small, folder=tmp_path)
    with pytest.raises(RunFolderError, match="name was 'fedavg' there and is 'flhc' now"):
        FLHC(rounds=2, pre_rounds=1).fit(small, folder=tmp_path)


def test_a_run_of_the_command_line_is_gone_on_with_from_python_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*SMALL_FEDERATION, "--rounds", "3", "--quiet"]
    assert main(["run", "fedavg", *options, "--out", str(tmp_path / "r")]) == 0
    plan, _ = loading.plan_of(tmp_path / "r")
    assert plan.simulation is not None
    fitted = plan.protocol.fit(plan.simulation.federation(), plan.settings, folder=tmp_path / "r")
    assert [int(c) for c in fitted.labels_] == json.loads(
        (tmp_path / "r" / "result.json").read_text()
    )["labels"]


def test_saving_does_not_write_into_a_run_folder(small: Federation, tmp_path: Path) -> None:
    fitted = made().fit(small, folder=tmp_path / "r")
    with pytest.raises(UsageError, match="is a run folder"):
        fitted.save(tmp_path / "r")
    fitted.save(tmp_path / "s")
    assert torch.equal(models(FedAvg.load(tmp_path / "s")), models(fitted))
    assert not hasattr(FedAvg.load(tmp_path / "s"), "transcript_")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        (None, {}),
        (LabelSwap(clusters=2), {"clusters": 2}),
        (Dirichlet(alpha=0.3), {"alpha": 0.3}),
        (Pathological(labels=3), {"labels_per_client": 3}),
        ("tasks+rotation", {}),
    ],
)
def test_a_run_that_python_started_on_dealt_data_is_gone_on_with_from_the_command_line(
    scenario: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    federation = Federation.simulate("digits", scenario=scenario, clients=6, samples=24, seed=3)
    simulation = Simulation.of(federation)
    assert simulation is not None
    assert {name: getattr(simulation, name) for name in options} == options
    assert simulation.federation().digest() == federation.digest()
    stopped(tmp_path, federation)
    assert main(["resume", str(tmp_path), "--quiet"]) == 0
    assert torch.equal(models(FedAvg.load(tmp_path)), models(made().fit(federation, FULL)))


def test_what_no_option_makes_has_none() -> None:
    federation = Federation.simulate("digits", clients=6, samples=24, seed=3)
    assert Simulation.of(federation.select([0, 1, 2])) is None
    assert Simulation.of(data(1)) is None
    twice = Combined((Rotation(clusters=2), Inversion()))
    assert (
        Simulation.of(Federation.simulate("digits", scenario=twice, clients=8, samples=24, seed=3))
        is None
    )


def test_a_file_of_ones_own_is_read_again(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)
    rows = [
        (f"s{k % 3}", int(draw.integers(2)), k, float(draw.random()), float(draw.random()))
        for k in range(60)
    ]
    columns = dict(
        zip(("site", "label", "row", "a", "b"), map(list, zip(*rows, strict=True)), strict=True)
    )
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    chosen = {"client_column": "site", "label_column": "label", "drop_columns": ("row",)}
    federation = Federation.from_parquet(tmp_path / "own.parquet", seed=0, **chosen)  # type: ignore[arg-type]
    stopped(tmp_path / "r", federation)
    assert main(["resume", str(tmp_path / "r"), "--quiet"]) == 0


def bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("halfway", [True, False])
def test_a_transcript_is_for_its_owners_eyes(halfway: bool, tmp_path: Path) -> None:
    """Under central placement its frames hold clipped updates without noise."""
    if halfway:
        stopped(tmp_path, data(1))
    made().fit(data(1), FULL, folder=tmp_path)
    home = tmp_path / "transcript"
    assert bits(home) == 0o700
    names = [path.name for path in home.iterdir()]
    assert "index.jsonl" in names
    assert len(names) > 4
    assert {bits(path) for path in home.iterdir()} == {0o600}
    assert bits(tmp_path / "result.json") == 0o644


def test_a_checkpoint_is_not_written_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes").write_text("precious")
    stopped(tmp_path / "r", data(1))
    (tmp_path / "r" / ".checkpoint.tmp").symlink_to(other)
    made().fit(data(1), FULL, folder=tmp_path / "r")
    assert [path.name for path in other.iterdir()] == ["notes"]


def test_a_link_in_the_place_of_a_log_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    stopped(tmp_path / "r", data(1))
    log = tmp_path / "r" / "history.jsonl"
    victim.write_bytes(log.read_bytes())
    log.unlink()
    log.symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(RunFolderError, match="remove the link"):
        made().fit(data(1), FULL, folder=tmp_path / "r")
    assert victim.read_bytes() == before


def test_what_a_kill_left_half_written_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    stopped(tmp_path, data(1))
    for name in (".models.safetensors", "transcript/.000001.safetensors"):
        (tmp_path / f"{name}.0123456789abcdef.tmp").write_bytes(b"half")
    made().fit(data(1), FULL, folder=tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def cell(folder: Path, seed: int, **more: Any) -> FedAvg:
    """A notebook's cell that makes a module and fits it; a kernel's generator goes on from run to
    run of the cell.
    """
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(4, 2))
    return made(model=network).fit(data(1), FULL, folder=folder, **more)


def test_a_cell_run_twice_with_an_own_module_says_how_to_go_on(tmp_path: Path) -> None:
    first = cell(tmp_path, 0)
    with pytest.raises(
        RunFolderError,
        match=r"another model: the first weights of an own module differ from run to run unless "
        r"torch\.manual_seed is called just before it is made\): .*give another folder, or replace "
        r"the run with force=True$",
    ):
        cell(tmp_path, 1)
    assert torch.equal(models(cell(tmp_path, 0)), models(first)), "the same seed loads the run"
    replaced = cell(tmp_path, 1, force=True)
    assert not torch.equal(models(replaced), models(first))
    assert torch.equal(models(cell(tmp_path, 1)), models(replaced))
    with pytest.raises(RunFolderError, match=r"\(another model\)"):
        made(model=torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh())).fit(
            data(1), FULL, folder=tmp_path
        )


@pytest.mark.parametrize("ended", [True, False])
def test_force_replaces_a_run_whether_it_ended_or_not(ended: bool, tmp_path: Path) -> None:
    target = tmp_path / "run"
    if ended:
        made().fit(data(1), FULL, folder=target)
    else:
        stopped(target, data(1))
    rounds: list[int] = []
    fitted = made().fit(
        data(2), FULL, folder=target, force=True, report=lambda line: rounds.append(line["round"])
    )
    assert rounds == [1, 2, 3, 4]
    assert torch.equal(models(fitted), models(made().fit(data(2), FULL)))
    assert torch.equal(models(made().fit(data(2), FULL, folder=target)), models(fitted))
    new = made().fit(data(2), FULL, folder=tmp_path / "new", force=True)
    assert torch.equal(models(new), models(fitted))


def test_force_without_a_folder_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="force replaces the run in a folder: give folder"):
        made().fit(data(1), FULL, force=True)
