"""Exported models run where this package is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import two_clusters
from safetensors.torch import load_file
from torch import nn

from securecluster import CFL, Federation, at
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.architectures import NETWORKS
from securecluster.models.objectives import Language, Objective, Trajectory
from securecluster.protocols import (
    IFCA,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    Settings,
)

# run in the folder of an export, in a process that cannot import this package
PROGRAM = """
import sys
sys.modules["securecluster"] = None
sys.path.insert(0, ".")
import numpy, torch, load
model = load.load("site b")
x = torch.as_tensor(numpy.load("samples.npy"))
numpy.save("outputs.npy", model(x).detach().numpy())
if load.content()["objective"] == "classification":
    print(load.predict(model, x))
"""
TWO_MODELS: dict[str, Any] = {"k": 2, "starts": 2, "start_rounds": 1}
NAMES = [(kind, name) for kind, networks in NETWORKS.items() for name in networks]


def federation_for(kind: str) -> Federation:
    """Return three sites with a few samples of a kind."""
    generator = np.random.default_rng(0)
    objective: Objective | None = None
    sites: dict[str, Any] = {}
    for name in ("site a", "site b", "site c"):
        if kind == "language":
            tokens = generator.integers(0, 9, (10, 5))
            sites[name] = tokens, tokens
            objective = Language()
        elif kind == "trajectory":
            sites[name] = generator.random((10, 5, 2)), generator.random((10, 2))
            objective = Trajectory()
        else:
            sites[name] = generator.random((10, 1, 16, 16)), np.arange(10) % 3
    options: dict[str, Any] = {} if objective is None else {"objective": objective}
    return Federation.from_arrays(sites, seed=0, **options)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_network_runs_without_this_package(kind: str, name: str, tmp_path: Path) -> None:
    federation = federation_for(kind)
    run = FedAvg(rounds=1, epochs=1, model=name).fit(federation)
    run.export(tmp_path / "exported")
    x = federation.shards[1].x
    np.save(tmp_path / "exported" / "samples.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path / "exported",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = np.load(tmp_path / "exported" / "outputs.npy")
    expected = run.module_of("site b")(torch.as_tensor(x)).detach().numpy()
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    if kind == "classification":
        assert json.loads(done.stdout) == run.predict_samples("site b", x).tolist()


def loader_of(folder: Path) -> Any:
    """Return the loader of an exported folder as a module."""
    spec = importlib.util.spec_from_file_location(f"load_{folder.name}", folder / "load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def swapped() -> Federation:
    return two_clusters(6, 60)


def test_a_file_a_cluster_and_who_is_in_which(swapped: Federation, tmp_path: Path) -> None:
    run = IFCA(**TWO_MODELS, rounds=3, model="linear").fit(swapped, Settings(dtype="float64"))
    run.export(tmp_path / "ifca")
    files = {path.name for path in (tmp_path / "ifca").iterdir()}
    clusters = {f"cluster{c}.safetensors" for c in set(run.labels_.tolist())}
    assert files == {"clusters.json", "load.py", *clusters}
    content = json.loads((tmp_path / "ifca" / "clusters.json").read_text())
    assert content["clients"] == dict(zip(swapped.names, run.labels_.tolist(), strict=True))
    assert content["classes"] == list(range(10)) and content["personal"] == []
    loader = loader_of(tmp_path / "ifca")
    for name, label in content["clients"].items():
        for model in (loader.load(name), loader.load(cluster=label)):
            assert model[1].weight.dtype == torch.float64
            assert torch.equal(model[1].weight, run.model_of(name)["1.weight"])


def test_personal_models_are_written_for_those_who_are_named_alone(
    swapped: Federation, tmp_path: Path
) -> None:
    run = FineTune(rounds=3, tune_rounds=1, model="linear").fit(swapped)
    run.export(tmp_path / "named", clients=["2", at(4)])
    content = json.loads((tmp_path / "named" / "clusters.json").read_text())
    assert content["own"] == {"2": "client2.safetensors", "4": "client4.safetensors"}
    assert content["personal"] == list(swapped.names)
    loader = loader_of(tmp_path / "named")
    assert torch.equal(loader.load("2")[1].weight, run.model_of("2")["1.weight"])
    with pytest.raises(KeyError, match="3 has a model of its own, which was not exported"):
        loader.load("3")
    assert torch.equal(loader.load(cluster=0)[1].weight, run.models_[0]["1.weight"])
    # another export leaves nothing of this one
    run.export(tmp_path / "named")
    assert not list((tmp_path / "named").glob("client*"))


@pytest.mark.parametrize(
    "protocol",
    [
        Hidden(k=2, rounds=2, model="linear", clip=1.0, noise=0.5),
        Hidden(k=2, rounds=2, model="linear"),
        IFCA(**TWO_MODELS, rounds=2, model="linear", aggregation="secagg"),
    ],
    ids=["private", "plain", "ifca"],
)
def test_clusters_that_clients_alone_know_are_exported_on_request_alone(
    protocol: ClusteringProtocol, swapped: Federation, tmp_path: Path
) -> None:
    run = protocol.fit(swapped)
    labels = dict(zip(swapped.names, run.labels_.tolist(), strict=True))
    with pytest.warns(SecureClusterWarning, match="does not say which client is in which cluster"):
        run.export(tmp_path / "exported", clients=["2"])
    content = json.loads((tmp_path / "exported" / "clusters.json").read_text())
    assert content["clients"] is None and content["personal"] is None
    # of single clients it names the one that was asked for
    del content["own"]
    texts = json.dumps([value for key, value in content.items() if key != "clusters"])
    assert not [name for name in swapped.names if f'"{name}"' in texts]
    files = {path.name for path in (tmp_path / "exported").glob("*.safetensors")}
    assert files == {*content["clusters"].values(), "client2.safetensors"}
    loader = loader_of(tmp_path / "exported")
    for c in map(int, content["clusters"]):
        assert torch.equal(loader.load(cluster=c)[1].weight, run.models_[c]["1.weight"])
    assert torch.equal(loader.load("2")[1].weight, run.model_of("2")["1.weight"])
    with pytest.raises(KeyError, match="0 alone knows its cluster"):
        loader.load("0")
    # nothing of an export with labels stays in one without them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.export(tmp_path / "asked", labels=True)
    assert json.loads((tmp_path / "asked" / "clusters.json").read_text())["clients"] == labels
    assert torch.equal(
        loader_of(tmp_path / "asked").load("0")[1].weight, run.model_of("0")["1.weight"]
    )
    with pytest.warns(SecureClusterWarning):
        run.export(tmp_path / "asked")
    assert json.loads((tmp_path / "asked" / "clusters.json").read_text())["clients"] is None


def test_models_without_noise_of_a_run_with_noise_stay_with_clients(
    swapped: Federation, tmp_path: Path
) -> None:
    run = Local(model="linear", rounds=1, clip=1.0, noise=1.0).fit(swapped)
    with pytest.raises(UsageError, match="no cluster shares a model: name the clients"):
        run.export(tmp_path / "local")
    run.export(tmp_path / "local", clients=["1"])
    tensors = [path.name for path in (tmp_path / "local").glob("*.safetensors")]
    assert tensors == ["client1.safetensors"]


def test_frozen_tensors_are_written_once_and_a_module_of_one_s_own_is_filled(
    swapped: Federation, tmp_path: Path
) -> None:
    def network() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
        module[1].requires_grad_(False)
        return module

    run = IFCA(**TWO_MODELS, rounds=2, model=network()).fit(swapped)
    run.export(tmp_path / "own")
    assert set(load_file(tmp_path / "own" / "frozen.safetensors")) == {"1.weight", "1.bias"}
    for file in (tmp_path / "own").glob("cluster*.safetensors"):
        assert set(load_file(file)) == {"3.weight", "3.bias"}
    loader = loader_of(tmp_path / "own")
    with pytest.raises(TypeError, match="a module of your own: give load one of its class"):
        loader.load("0")
    x = torch.as_tensor(swapped.shards[0].x_test)
    model = loader.load("0", module=network())
    assert torch.equal(model(x), run.module_of("0")(x))
    with pytest.raises(ValueError, match="other tensors than the run's, such as"):
        loader.load("0", module=nn.Sequential(nn.Flatten(), nn.Linear(64, 20)))


def test_feature_names_travel(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    frames = {
        name: (pd.DataFrame(generator.normal(size=(20, 2)), columns=["age", "dose"]), [0, 1] * 10)
        for name in ("north", "south")
    }
    run = CFL(model="linear", rounds=1).fit(Federation.from_arrays(frames, seed=0))
    run.export(tmp_path)
    assert json.loads((tmp_path / "clusters.json").read_text())["features"] == ["age", "dose"]


def test_other_folders_and_formats_are_refused(
    swapped: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FedAvg(model="linear", rounds=1).fit(swapped, folder=tmp_path / "run")
    with pytest.raises(UsageError, match="which is of no export: give a new folder"):
        run.export(tmp_path / "run")
    with pytest.raises(UsageError, match="format 'pickle' is unknown: choose safetensors or onnx"):
        run.export(tmp_path / "x", format="pickle")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="format onnx needs onnx and onnxscript: pip install"):
        run.export(tmp_path / "x", format="onnx")
    assert not (tmp_path / "x").exists()


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_an_onnx_graph_takes_any_number_of_samples(swapped: Federation, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run = FedAvg(model="mlp-32", rounds=1).fit(swapped)
    run.export(tmp_path, format="onnx")
    session = runtime.InferenceSession(str(tmp_path / "cluster0.onnx"))
    for size in (1, 7):
        x = swapped.shards[0].x[:size]
        outputs = session.run(None, {"samples": x})[0]
        expected = run.module_of(cluster=0)(torch.as_tensor(x)).detach().numpy()
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
