"""Under noise the results hold models made of releases alone: what a client trained for itself
stays with it.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import cases
import pytest
import torch
from cases import WAYS, Protocol
from safetensors import safe_open
from safetensors.torch import load_file

from securecluster import Federation
from securecluster.cli.main import main
from securecluster.messaging.messages import Call
from securecluster.protocols import (
    FLHC,
    NSIM,
    SRFCA,
    ClusteringProtocol,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
)
from securecluster.runs import simulated_run

CLIENTS = 4
SOME: dict[str, Any] = {"rounds": 3, "epochs": 1, "model": "mlp-32"}


APART: dict[str, Any] = {"min_samples": 2, "eps": 1e-9}
LONE: dict[str, tuple[Protocol, dict[str, Any]]] = {
    "flhc": (FLHC, {"threshold": 0.0, "linkage": "complete"}),
    "nsim": (NSIM, {**APART, "local_rounds": 2}),
    "nsim, no rounds left": (NSIM, {**APART, "local_rounds": 3}),
    "local k-means": (LocalKMeans, {"k": CLIENTS}),
    "one-shot": (OneShot, {"tasks": CLIENTS, "gram_noise": 1.0}),
    "random": (RandomClusters, {"k": CLIENTS}),
    "local": (Local, {}),
}


def made(kind: Protocol, params: dict[str, Any], noise: float, **more: Any) -> ClusteringProtocol:
    noisy = {"clip": 0.5, "noise": noise, "mask": "permutation"}
    return cast(ClusteringProtocol, cases.build(kind, **{**SOME, **noisy, **params, **more}))


def silence(monkeypatch: pytest.MonkeyPatch, client: int, after: str) -> None:
    """A client that is not heard of again once it has answered the calls of a method."""
    seen: set[str] = set()

    def lost(call: Call) -> set[int]:
        before = after in seen and call.method != after
        seen.add(call.method)
        return {client} if before else set()

    def dropouts(*_: Any) -> Callable[[Call], set[int]]:
        seen.clear()
        return lost

    monkeypatch.setattr(simulated_run, "random_dropouts", dropouts)


def models_file(fitted: ClusteringProtocol, folder: Path) -> dict[str, torch.Tensor]:
    fitted.save(folder)
    assert stat.S_IMODE((folder / "clients.safetensors").stat().st_mode) == 0o600
    return load_file(folder / "models.safetensors")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "way"),
    cases.covering(
        [(name, way) for name in LONE for way in WAYS],
        [
            *((name, "client") for name in LONE),
            *(("nsim", way) for way in WAYS),
            ("flhc", "example"),
            ("local k-means", "example"),
            ("one-shot", "central"),
        ],
    ),
)
def test_what_clients_trained_alone_is_in_no_file_for_others(
    name: str, way: str, four_clients: Federation, tmp_path: Path
) -> None:
    """Two runs that differ in their noise alone share no tensor.

    What they shared would have no noise.
    """
    kind, params = LONE[name]
    levels = (0.1, 0.2) if way == "example" else (2.0, 20.0)
    if name == "flhc":  # at which it leaves some clients alone
        levels = (0.002, 0.004)
    runs = [made(kind, params, noise, **WAYS[way]).fit(four_clients) for noise in levels]
    one, two = (models_file(fitted, tmp_path / str(k)) for k, fitted in enumerate(runs))
    assert not [name for name in one if name in two and torch.equal(one[name], two[name])]
    for fitted in runs:
        alone = [c for c in range(1 + max(fitted.labels_)) if list(fitted.labels_).count(c) == 1]
        assert alone
        assert fitted.unshared_labels_ == alone
        assert [c for c, model in enumerate(fitted.models_) if model is None] == alone
        assert fitted.model_of(0).keys() == fitted.model_of(CLIENTS - 1).keys()
    again = kind.load(tmp_path / "0", **({"walks": cases.digit_users} if kind is NSIM else {}))
    assert again.unshared_labels_ == runs[0].unshared_labels_
    assert [model is None for model in again.models_] == [
        model is None for model in runs[0].models_
    ]
    with safe_open(tmp_path / "0" / "models.safetensors", "pt") as file:
        assert json.loads(file.metadata()["securecluster"])["unshared"] == json.dumps(
            again.unshared_labels_
        )


def test_the_models_of_lone_clients_have_no_noise_indeed(four_clients: Federation) -> None:
    """What the test above guards against: a lone client's model is the same under any noise."""
    kind, params = LONE["nsim"]
    one, two = (made(kind, params, noise).fit(four_clients).model_of(0) for noise in (5.0, 50.0))
    assert all(torch.equal(one[name], two[name]) for name in one)


LAGGING: dict[str, tuple[Protocol, dict[str, Any], str]] = {
    "nsim": (NSIM, {"min_samples": 2, "local_rounds": 2}, "pool"),
    "local k-means": (LocalKMeans, {"k": 1, "local_rounds": 2}, "send_model"),
    "local k-means, silent": (LocalKMeans, {"k": 1, "local_rounds": 2}, "train_locally"),
    "sr-fca": (SRFCA, {"distance": "l2", "threshold": 1e9, "rounds": 2}, "send_model"),
}


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:threshold = 1000000000.0, a λ of 1e.09, joins all")
@pytest.mark.parametrize(
    ("name", "mask"),
    cases.covering(
        [(name, mask) for name in LAGGING for mask in ("none", "permutation")],
        [*((name, "permutation") for name in LAGGING), ("nsim", "none")],
    ),
)
def test_a_cluster_whose_first_member_never_got_the_average_shows_another_members_model(
    name: str, mask: str, four_clients: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, params, after = LAGGING[name]
    silence(monkeypatch, 0, after)
    runs = [made(kind, params, noise, mask=mask).fit(four_clients) for noise in (5.0, 50.0)]
    alone = [fitted.model_of(0) for fitted in runs]
    assert all(torch.equal(alone[0][key], alone[1][key]) for key in alone[0]), (
        "client 0 is to hold what it trained alone"
    )
    for fitted in runs:
        own = int(fitted.labels_[0])
        company = [i for i in range(1, CLIENTS) if fitted.labels_[i] == own]
        shown = fitted.models_[own]
        if company:
            assert shown is not None
            assert all(
                torch.equal(value, fitted.model_of(company[0])[key]) for key, value in shown.items()
            )
        else:
            assert shown is None
            assert fitted.unshared_labels_ == [own]


def test_labels_with_and_without_a_shared_model(four_clients: Federation, tmp_path: Path) -> None:
    """Three random clusters of four clients: a pair, and two clients alone."""
    fitted = made(RandomClusters, {"k": 3}, 5.0).fit(four_clients)
    sizes = [list(fitted.labels_).count(c) for c in range(3)]
    assert sorted(sizes) == [1, 1, 2]
    pair = sizes.index(2)
    assert fitted.unshared_labels_ == [c for c in range(3) if c != pair]
    shown = fitted.models_[pair]
    assert shown is not None
    names = {f"cluster{pair}.{key}" for key in shown}
    assert set(models_file(fitted, tmp_path)) == names


@pytest.mark.parametrize(
    ("kind", "params"), [(RandomClusters, {"k": CLIENTS}), (OneShot, {"tasks": CLIENTS})]
)
def test_runs_without_noise_keep_every_clusters_model(
    kind: Protocol, params: dict[str, Any], four_clients: Federation, tmp_path: Path
) -> None:
    fitted = kind(**{**SOME, **params}).fit(four_clients)
    assert fitted.unshared_labels_ == []
    assert all(model is not None for model in fitted.models_)
    assert {key.partition(".")[0] for key in models_file(fitted, tmp_path)} == {
        f"cluster{c}" for c in range(CLIENTS)
    }


def test_noise_in_gram_matrices_alone_counts_as_noise(four_clients: Federation) -> None:
    fitted = OneShot(**SOME, tasks=CLIENTS, gram_noise=1.0).fit(four_clients)
    assert fitted.unshared_labels_ == list(range(CLIENTS))


class StopError(Exception):
    """The process dies."""


def test_who_trained_alone_is_known_after_a_stop(four_clients: Federation, tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise StopError

    params = {"participation": 0.25, "rounds": 3}
    whole = made(Local, params, 5.0).fit(four_clients)
    with pytest.raises(StopError):
        made(Local, params, 5.0).fit(four_clients, folder=tmp_path / "r", report=stop)
    resumed = made(Local, params, 5.0).fit(four_clients, folder=tmp_path / "r")
    assert resumed.kept_.learned.local == whole.kept_.learned.local
    assert 0 < len(whole.kept_.learned.local) < CLIENTS, (
        "who was never asked holds the first weights"
    )
    assert resumed.unshared_labels_ == whole.unshared_labels_


def test_a_run_says_which_clusters_have_no_shared_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--rounds", "1", "--clients", "4", "--samples", "20", "--k", "3", "--clip", "1", "--noise",
        "5",
    ]  # fmt: skip
    assert main(["run", "random", *small, "--out", str(tmp_path / "r")]) == 0
    privacy = json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]
    labels = privacy["unshared_models"]["labels"]
    assert len(labels) == 2
    assert privacy["unshared_models"]["file"] == "clients.safetensors"
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"clusters {labels[0]}, {labels[1]}" in said
    assert "clients.safetensors" in said
    assert main(["replay", str(tmp_path / "r")]) == 0
