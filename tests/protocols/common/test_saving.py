"""What was learned: to a folder and back, without pickle; handed out as state_dicts; and newcomers
of every protocol.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import two_clusters

from securecluster import Federation, Iid
from securecluster.cli.main import main
from securecluster.core.client_names import at
from securecluster.errors import RunFolderError, SecureClusterError, UsageError
from securecluster.parties.derived import initial_model
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, FineTune, Local, Settings

EVERY = [
    (CFL, "permutation"), (CFL, "rotation"), (FedAvg, "none"), (FedAvg, "permutation"),
    (FineTune, "permutation"), (Local, "none"),
]  # fmt: skip
PLACED = (
    "labels_", "bytes_", "history_", "dropped_", "agreement_", "server_state_", "seconds_",
    "device_",
)  # fmt: skip


@pytest.fixture
def later() -> Federation:
    """Three clients that come when the run is over."""
    return two_clusters(9, 40).select([6, 7, 8])


def module() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


@pytest.mark.few(2)
@pytest.mark.parametrize(("protocol", "mask"), EVERY)
def test_a_saved_protocol_comes_back_whole(
    protocol: type[ClusteringProtocol],
    mask: str,
    small: Federation,
    later: Federation,
    tmp_path: Path,
) -> None:
    fitted = protocol(mask=mask, rounds=3).fit(small)
    fitted.save(tmp_path / "kept")
    found = protocol.load(str(tmp_path / "kept"))
    assert type(found) is protocol
    assert found.get_params() == fitted.get_params()
    for name in PLACED:
        one, two = getattr(fitted, name), getattr(found, name)
        assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two, name
    assert torch.equal(found.client_models_.values, fitted.client_models_.values)
    np.testing.assert_array_equal(found.accuracy_, fitted.accuracy_)
    assert found.ledger_.events == fitted.ledger_.events
    assert list(found.join(later)) == list(fitted.join(later))
    for one, two in zip(fitted.models_, found.models_, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_only_its_owner_may_read_the_clients_keys_and_nothing_is_pickled(
    small: Federation, tmp_path: Path
) -> None:
    CFL(rounds=1).fit(small).save(tmp_path)
    assert stat.S_IMODE((tmp_path / "clients.safetensors").stat().st_mode) == 0o600
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [
        "clients.safetensors",
        "learned.safetensors",
        "models.safetensors",
        "server.safetensors",
    ]
    others = {p.name for p in tmp_path.iterdir()} - set(files)
    assert others == {".securecluster", "manifest.json"}
    from safetensors import safe_open

    for name in files:
        with safe_open(tmp_path / name, "pt") as file:
            list(file.keys())
    seed = CFL(rounds=1).fit(small).kept_.clients.secrets.seed[0]
    for name in files[1:]:
        assert seed.hex().encode() not in (tmp_path / name).read_bytes()
        assert seed not in (tmp_path / name).read_bytes()


def test_a_module_of_ones_own_is_saved_by_its_weights(
    small: Federation, later: Federation, tmp_path: Path
) -> None:
    fitted = CFL(model=module(), rounds=2).fit(small)
    fitted.save(tmp_path)
    # other weights, the same layers
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    found = CFL.load(tmp_path, model=other)
    assert torch.equal(found.client_models_.values, fitted.client_models_.values)
    assert list(found.join(later)) == list(fitted.join(later))
    with pytest.raises(UsageError, match="model=your module"):
        CFL.load(tmp_path)
    for wrong in (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 11)),
        torch.nn.Linear(64, 10),
        torch.nn.Sequential(),
    ):
        with pytest.raises(UsageError, match="not the one"):
            CFL.load(tmp_path, model=wrong)


def test_what_cannot_be_loaded_is_said(small: Federation, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not fitted yet"):
        CFL().save(tmp_path / "a")
    with pytest.raises(UsageError, match="not fitted yet"):
        CFL().join(small)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RunFolderError, match="no fitted protocol"):
        CFL.load(tmp_path)
    FedAvg(rounds=1).fit(small).save(tmp_path)
    with pytest.raises(UsageError, match="holds the protocol 'fedavg'"):
        CFL.load(tmp_path)
    with pytest.raises(UsageError, match="needs no module"):
        FedAvg.load(tmp_path, model=module())
    for name in ("clients.safetensors", "server.safetensors", "learned.safetensors"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(RunFolderError):
            FedAvg.load(tmp_path)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "server.safetensors").unlink()
    with pytest.raises(RunFolderError):
        FedAvg.load(tmp_path)


def test_a_save_that_is_cut_off_is_no_saved_protocol(
    small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CFL(rounds=1).fit(small).save(tmp_path)
    replace = os.replace

    def cut_off(source: Any, target: Any) -> None:
        if Path(target).name == "server.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    fitted = CFL(rounds=1, lr=0.1).fit(small)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut_off)
        with pytest.raises(KeyboardInterrupt):
            fitted.save(tmp_path)
    with pytest.raises(RunFolderError, match=r"manifest\.json is missing"):
        CFL.load(tmp_path)
    fitted.save(tmp_path)  # which goes where a save was cut off
    assert torch.equal(CFL.load(tmp_path).client_models_.values, fitted.client_models_.values)


def test_a_full_disk_loses_no_earlier_result(
    small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = CFL(rounds=1).fit(small)
    earlier.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFolderError, match="free some space"):
            CFL(rounds=1, lr=0.1).fit(small).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json", "clients.safetensors", "learned.safetensors", "start.safetensors",
        "secret.key", "newcomers.jsonl",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_save_takes_no_file_of_somebody_else(
    name: str, kind: str, ended: Any, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("mine")
    project = tmp_path / "project"
    project.mkdir()
    if kind == "file":
        (project / name).write_text('{"name": "an extension"}')
    elif kind == "link":
        (project / name).symlink_to(tmp_path / "victim")
    else:
        (project / name).mkdir()
        (project / name / "notes").write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"which is of no result that was saved there|ledger that"):
        ended.save(project)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.fixture(scope="module")
def ended() -> Any:
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    return FedAvg(rounds=1, model="linear").fit(federation)


@pytest.mark.parametrize(("protocol", "mask"), EVERY)
def test_newcomers_of_other_data_are_refused(
    protocol: type[ClusteringProtocol], mask: str, small: Federation
) -> None:
    fitted = protocol(mask=mask, rounds=1).fit(small)
    x, y = np.random.default_rng(0).random((8, 1, 8, 8)), np.arange(8)
    for wrong in ({"a": (x[:, :, :4], y)}, {"a": (x, np.where(y, y + 5, 0))}):
        with pytest.raises(UsageError, match="the same kind of data"):
            fitted.join(Federation.from_arrays(wrong, seed=0))
    # fewer classes are no trouble
    assert fitted.join(Federation.from_arrays({"a": (x, y % 2)}, seed=0)).shape == (1,)


def test_a_clients_model_is_loaded_into_ones_own_module(small: Federation) -> None:
    net = module()
    fitted = CFL(model=net, rounds=2).fit(small)
    for client, k in ((0, 0), (at(5), 5), (small.names[2], 2), (np.int64(3), 3), (1.0, 1)):
        state = fitted.model_of(client)  # type: ignore[arg-type]
        net.load_state_dict(state)
        shard = small.shards[k]
        hits = net(torch.as_tensor(shard.x_test)).argmax(-1).numpy() == shard.y_test
        assert hits.mean() == pytest.approx(fitted.accuracy_[k])
    for wrong in (6, -1, "nobody", None, 1.5, True, at(6)):
        with pytest.raises(UsageError, match="no client"):
            fitted.model_of(wrong)  # type: ignore[arg-type]


def test_what_was_learned_stays_whatever_its_object_is_told_later(
    small: Federation, later: Federation, tmp_path: Path
) -> None:
    fitted = CFL(rounds=3, eps1=0.9, level=0.01).fit(small)
    found, node = list(fitted.join(later)), fitted.node_model(0)
    fitted.set_params(mask="none", model="linear", tree=False, rounds=1)
    assert list(fitted.join(later)) == found
    assert all(torch.equal(fitted.node_model(0)[name], value) for name, value in node.items())
    fitted.save(tmp_path)
    assert CFL.load(tmp_path).get_params() == CFL(rounds=3, eps1=0.9, level=0.01).get_params()
    fitted.fit(small)
    assert len(fitted.history_) == 1
    assert not hasattr(fitted, "joined_")  # of another run


def test_a_module_that_was_trained_on_still_lets_newcomers_in(
    small: Federation, later: Federation, tmp_path: Path
) -> None:
    net = module()
    fitted = CFL(model=net, rounds=2).fit(small)
    found, start = list(fitted.join(later)), fitted.network_.initial()
    net.load_state_dict(fitted.models_[0])  # as the README does
    assert list(fitted.join(later)) == found
    assert torch.equal(initial_model(fitted.result_.method, small).initial(), start)
    fitted.save(tmp_path)
    assert list(CFL.load(tmp_path, model=net).join(later)) == found


def test_a_run_folder_is_loaded_like_a_saved_protocol(tmp_path: Path) -> None:
    command = ["run", "cfl", "--rounds", "2", "--clients", "6", "--samples", "30", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "r")]) == 0
    found = CFL.load(tmp_path / "r")
    assert len(found.labels_) == 6
    newcomers = Federation.simulate("digits", scenario=Iid(), clients=2, samples=30, seed=9)
    assert len(found.join(newcomers)) == 2
    with pytest.raises(SecureClusterError):
        FedAvg.load(tmp_path / "r")


def test_some_clients_of_a_federation(small: Federation) -> None:
    some = small.select([4, 1])
    assert some.names == (small.names[4], small.names[1])
    assert some.shards == (small.shards[4], small.shards[1])
    assert small.truth is not None
    assert some.truth == (small.truth[4], small.truth[1])
    assert small.select([at(4), np.int64(1)]).names == some.names == small.select(("4", 1)).names
    for twice in ([0, 0], [0, "0"], [at(0), 0]):
        with pytest.raises(UsageError, match="client '0' is selected twice: give each client once"):
            small.select(twice)
    for wrong in ([6], [-1], [at(6)], [True]):
        with pytest.raises(UsageError, match="there is no client"):
            small.select(wrong)
    assert some.select([4]).shards == (small.shards[4],), "it is still called 4"
    with pytest.raises(UsageError, match=r"a number is a name, and at\(0\) is .* '4'"):
        some.select([0])


class Tied(torch.nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            torch.nn.Linear(64, 64),
            torch.nn.Linear(64, 64),
            torch.nn.Linear(64, 10),
        )
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.second(self.first(x.flatten(1)).relu()))
        return found


def test_a_module_with_tied_weights_is_saved(
    small: Federation, later: Federation, tmp_path: Path
) -> None:
    fitted = CFL(model=Tied(), rounds=2).fit(small)
    fitted.save(tmp_path)
    assert list(CFL.load(tmp_path, model=Tied()).join(later)) == list(fitted.join(later))


class Extra(torch.nn.Linear):
    """A layer whose state is not tensors alone."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


def test_extra_state_of_a_module_stays_with_its_code(
    small: Federation, later: Federation, tmp_path: Path
) -> None:
    own, other = (torch.nn.Sequential(torch.nn.Flatten(), Extra(64, 10)) for _ in range(2))
    fitted = CFL(model=own, rounds=1).fit(small)
    fitted.save(tmp_path)
    assert list(CFL.load(tmp_path, model=other).join(later)) == list(fitted.join(later))


def test_weights_that_are_loaded_into_the_module_after_the_run_change_nothing(
    small: Federation, later: Federation, tmp_path: Path
) -> None:
    own = module()
    fitted = FedAvg(model=own, rounds=2).fit(small)
    split = CFL(model=own, rounds=1, criterion="absolute", eps1=1e9, eps2=1e-9, gamma_max=0.0).fit(
        small, Settings(transcript="full")
    )
    before = [split.join(later).tolist(), told(split)]
    own.load_state_dict(fitted.models_[0])
    assert [split.join(later).tolist(), told(split)] == before
    split.save(tmp_path)
    assert CFL.load(tmp_path, model=module()).join(later).tolist() == before[0]


def told(fitted: ClusteringProtocol) -> list[float]:
    """The first newcomer's update, as it left."""
    entries = fitted.joined_.transcript.entries
    answer = fitted.joined_.transcript.content(
        next(k for k, e in enumerate(entries) if e.method == "train")
    )[1]
    first: list[float] = answer.reply.delta.values[0].tolist()
    return first


def test_newcomers_join_under_the_hyper_parameters_that_the_run_had(
    small: Federation, later: Federation
) -> None:
    """Without the mask of the run their updates would leave in the clear."""
    fitted = CFL(rounds=1, criterion="absolute", eps1=1e9, eps2=1e-9, gamma_max=0.0).fit(
        small, Settings(transcript="full")
    )
    before = list(fitted.join(later)), told(fitted)
    fitted.set_params(mask="none")
    assert (list(fitted.join(later)), told(fitted)) == before
