"""Runs that draw a secret of their own: keys, masks and noise follow from it, and not from the
seed.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.attacks.experiments import tapped
from securecluster.cli.main import main
from securecluster.core.randomness import Randomness
from securecluster.errors import ReplayError, RunFolderError
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, OneShot, Settings
from securecluster.runtime.endpoint import config_hash

pytestmark = pytest.mark.usefixtures("own_secrets")
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
FULL = Settings(transcript="full", threads=1, keys_from_seed=False)
FROM_SEED = dataclasses.replace(FULL, keys_from_seed=True)
SECRETIVE: dict[str, dict[str, Any]] = {
    "local noise": {"clip": 1.0, "noise": 1.0},
    "noise of a server": {"clip": 1.0, "noise": 1.0, "placement": "central"},
    "noise in shares": {"clip": 1.0, "noise": 1.0, "aggregation": "secagg"}
    | {"placement": "distributed"},
    "dp-sgd": {"clip": 1.0, "noise": 1.0, "dp_unit": "example"},
    "mask": {"mask": "permutation"},
    "secure sums": {"aggregation": "secagg"},
}
RANGE = 3000  # seeds that are guessed


@pytest.fixture(scope="module")
def clients() -> Federation:
    """Four clients of a seed that is one of a few thousand."""
    return Federation.simulate("digits", clients=4, samples=20, seed=1234)


def fitted(clients: Federation, settings: Settings = FULL, **options: Any) -> FedAvg:
    return FedAvg(**SMALL, **options).fit(clients, settings)


@pytest.mark.parametrize("name", SECRETIVE)
def test_runs_of_one_seed_share_neither_keys_nor_noise(name: str, clients: Federation) -> None:
    one, other = (fitted(clients, **SECRETIVE[name]) for _ in range(2))
    assert one.kept_.secret != other.kept_.secret
    mine, theirs = (vars(run.kept_.clients.secrets) for run in (one, other))
    for kind in ("noise", "private", "seed"):
        shared = {*mine[kind].values()} & {*theirs[kind].values()}
        assert not shared, kind
    assert one.transcript_.content(-1)[1].ids == other.transcript_.content(-1)[1].ids
    if "noise" in name or name == "dp-sgd":
        assert not torch.equal(one.client_models_.table, other.client_models_.table)


@pytest.mark.parametrize("name", SECRETIVE)
def test_a_run_repeats_bit_for_bit_with_its_keys_from_the_seed(
    name: str, clients: Federation
) -> None:
    one, other = (fitted(clients, FROM_SEED, **SECRETIVE[name]) for _ in range(2))
    assert one.kept_.secret is None
    assert one.server_state_ == other.server_state_
    assert torch.equal(one.client_models_.table, other.client_models_.table)


def test_runs_without_noise_and_masks_repeat_with_their_seed(clients: Federation) -> None:
    for protocol in (
        FedAvg(**SMALL),
        CFL(**SMALL, mask="none"),
        FedAvg(**SMALL, aggregation="secagg"),
    ):
        runs = [copy.deepcopy(protocol).fit(clients, FULL) for _ in range(2)]
        assert runs[0].kept_.secret != runs[1].kept_.secret
        assert runs[0].server_state_ == runs[1].server_state_
        assert torch.equal(runs[0].client_models_.table, runs[1].client_models_.table)


@pytest.mark.parametrize("name", SECRETIVE)
def test_the_server_replays_with_the_secret_of_its_run(name: str, clients: Federation) -> None:
    run = fitted(clients, **SECRETIVE[name])
    config = run.kept_.learned.config
    assert run.replay(run.transcript_, config, threads=1) == run.server_state_
    if name == "noise of a server":
        run.result_.kept_ = dataclasses.replace(run.kept_, secret=bytes(16))
        with pytest.raises(ReplayError):
            run.replay(run.transcript_, config, threads=1)


@pytest.mark.parametrize("name", SECRETIVE)
def test_a_repetition_with_the_secret_is_the_same_run(name: str, clients: Federation) -> None:
    run = fitted(clients, **SECRETIVE[name])
    again, _ = tapped(run, clients, FULL, run.kept_.secret)
    assert again.server_state_ == run.server_state_
    assert again.kept_.secret == run.kept_.secret
    anew, _ = tapped(run, clients, FULL)
    assert anew.kept_.secret != run.kept_.secret


@pytest.mark.parametrize("name", SECRETIVE)
def test_newcomers_join_by_the_keys_of_the_run_also_after_it_is_loaded(
    name: str, clients: Federation, tmp_path: Path
) -> None:
    later = Federation.simulate("digits", clients=6, samples=20, seed=1234).select([4, 5])
    run = fitted(clients, **SECRETIVE[name])
    run.save(tmp_path)
    loaded = FedAvg.load(tmp_path)
    assert loaded.kept_.secret == run.kept_.secret
    assert loaded.join(later).tolist() == run.join(later).tolist()


def guessed(run: ClusteringProtocol) -> int | None:
    """Return the seed by whose configuration the frames of a run have their hash."""
    public = {name: v for name, v in run.kept_.learned.config.items() if name != "seed"}
    seen = run.transcript_.content(0)[0].config
    for seed in range(RANGE):
        if config_hash({**public, "seed": seed}) == seen:
            return seed
    return None


@pytest.mark.parametrize(("settings", "falls"), [(FROM_SEED, True), (FULL, False)])
def test_a_guessed_seed_takes_off_no_mask(
    settings: Settings, falls: bool, clients: Federation
) -> None:
    run = FedAvg(**SMALL, mask="permutation")
    run, taps = tapped(run, clients, settings)
    seed = guessed(run)
    assert seed == 1234  # anybody may know it
    config = run.kept_.learned.config
    masked, true = first_updates(run, taps)
    opened = []
    for leader in range(len(clients)):
        pipeline = run.pipeline(config)
        pipeline.unlock(Randomness(seed).key("client", leader, "mask"))
        opened.append(torch.equal(pipeline.inverse(masked.values, masked.step), true))
    assert any(opened) is falls


@pytest.mark.parametrize(("settings", "falls"), [(FROM_SEED, True), (FULL, False)])
def test_a_guessed_seed_tells_no_candidate_by_its_noise(
    settings: Settings, falls: bool, clients: Federation
) -> None:
    run, taps = tapped(FedAvg(**SMALL, clip=1.0, noise=1.0), clients, settings)
    config = run.kept_.learned.config
    released, true = first_updates(run, taps)
    seed = guessed(run)
    assert seed is not None
    streams = NoiseStreams.derived(Randomness(seed), config_hash(config))
    pipeline = run.pipeline(config)
    pipeline.arm(streams)
    ids = tuple(range(len(clients)))
    candidate = pipeline.forward(true.clone(), released.step, False, ids, "delta")
    assert torch.equal(candidate, released.values) is falls


@dataclasses.dataclass(frozen=True)
class Released:
    """Updates as the server received them, and the number of their call."""

    values: torch.Tensor
    step: int


def first_updates(run: ClusteringProtocol, taps: Any) -> tuple[Released, torch.Tensor]:
    """Return the first round's updates as they left, and before that."""
    (tap, *_) = [tap for tap in taps if hasattr(tap.reply, "delta")]
    for position, entry in enumerate(run.transcript_.entries):
        call, answer = run.transcript_.content(position)
        if entry.method == tap.method:
            return Released(answer.reply.delta.values, call.step), tap.reply.delta.values
    raise AssertionError("no updates were sent")


def stopped(
    folder: Path, clients: Federation, kind: Callable[..., Any] = FedAvg, **options: Any
) -> None:
    """Leave a run that stopped after its first round."""

    def stop(line: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kind(**SMALL, **options).fit(clients, FULL, folder=folder, report=stop)


@pytest.mark.parametrize("name", SECRETIVE)
def test_a_resumed_run_ends_as_one_that_nothing_stopped(
    name: str, clients: Federation, tmp_path: Path
) -> None:
    stopped(tmp_path / "run", clients, **SECRETIVE[name])
    secret = (tmp_path / "run" / "secret.key").read_bytes()
    run = FedAvg(**SMALL, **SECRETIVE[name]).fit(clients, FULL, folder=tmp_path / "run")
    assert (tmp_path / "run" / "secret.key").read_bytes() == secret
    whole, _ = tapped(run, clients, FULL, run.kept_.secret)
    assert whole.server_state_ == run.server_state_
    assert main(["replay", str(tmp_path / "run")]) == 0
    loaded = FedAvg.load(tmp_path / "run")
    assert loaded.kept_.secret == run.kept_.secret


def test_a_stopped_run_without_its_secret_is_not_resumed(
    clients: Federation, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stopped(folder, clients, **SECRETIVE["local noise"])
    (folder / "secret.key").unlink()
    with pytest.raises(
        RunFolderError, match=r"restore secret\.key in its folder, or start the run anew"
    ):
        fitted_in(folder, clients, **SECRETIVE["local noise"])
    # before the first checkpoint, too: what was released is in the ledger alone
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(RunFolderError, match=r"restore secret\.key in its folder"):
        fitted_in(folder, clients, **SECRETIVE["local noise"])


def fitted_in(folder: Path, clients: Federation, **options: Any) -> FedAvg:
    return FedAvg(**SMALL, **options).fit(clients, FULL, folder=folder)


def test_a_folder_without_its_secret_is_read_and_neither_replayed_nor_audited(
    clients: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = fitted_in(folder, clients, **SECRETIVE["local noise"])
    (folder / "secret.key").unlink()
    assert main(["report", str(folder)]) == 0
    loaded = FedAvg.load(folder)
    assert loaded.labels_.tolist() == run.labels_.tolist()
    capsys.readouterr()
    for command in ("replay", "audit"):
        assert main([command, str(folder)]) == 2
        printed = capsys.readouterr()
        assert "restore secret.key in its folder, or start the run anew" in printed.err
        assert printed.err.count("\n") == 1
        assert f"{folder} is without the secret" in printed.err
    with pytest.raises(RunFolderError, match=r"restore secret\.key in its folder"):
        loaded.join(clients.select([0]))


@pytest.mark.always
def test_the_secret_is_in_its_file_alone(
    clients: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = fitted_in(folder, clients, **SECRETIVE["noise in shares"])
    assert main(["report", str(folder), "--html"]) == 0
    secret = run.kept_.secret
    assert secret is not None
    number = int.from_bytes(secret, "big")
    forms = [secret, secret[::-1], secret.hex().encode(), str(number).encode()]
    printed = capsys.readouterr().out + repr(run) + repr(run.kept_) + repr(run.transcript_)
    files = [path for path in folder.rglob("*") if path.is_file()]
    contents = {path.name: path.read_bytes() for path in files} | {"output": printed.encode()}
    found = {name for name, data in contents.items() if any(form in data for form in forms)}
    assert found == {"secret.key"}


def test_another_run_in_the_folder_has_another_secret(clients: Federation, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = fitted_in(folder, clients).kept_.secret
    again = FedAvg(**SMALL).fit(clients, FULL, folder=folder, force=True)
    assert again.kept_.secret != first
    FedAvg(**SMALL).fit(clients, FROM_SEED, folder=folder, force=True)
    assert not (folder / "secret.key").exists()


def test_the_keys_of_a_stopped_authority_are_for_the_owner_who_can_replace_the_run(
    clients: Federation, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stopped(folder, clients, OneShot, relevance="ckks")
    (kept,) = folder.glob("checkpoint-*/authority")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    FedAvg(**SMALL).fit(clients, FULL, folder=folder, force=True)
    assert not kept.exists()
