"""Every way to a prediction answers alike on samples as clients have them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from securecluster import CFL, Federation
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.protocols import IFCA, ClusteringProtocol, FedAvg, FineTune
from securecluster.results.preparation import SCALES

COLUMNS = ["age", "dose", "seconds"]
# run in the folder of an export, in a process that cannot import this package
PROGRAM = """
import sys
sys.modules["securecluster"] = None
sys.path.insert(0, ".")
import numpy, torch, load
x = torch.as_tensor(numpy.load("samples.npy"))
for name in sys.argv[1:]:
    print(load.predict(load.load(name), x))
"""


def table(name: str, size: int = 40) -> tuple[Any, Any]:
    """Return a table of one site, on scales of its own; `dose` is constant in the south."""
    generator = np.random.default_rng(sum(name.encode()))
    x = generator.normal(size=(size, 3)) * [9, 30, 40] + [50, 200, 1.7e9]
    x[:, 0] += 10 * generator.normal()
    y = np.where(x[:, 0] + generator.normal(size=size) > x[:, 0].mean(), "sick", "well")
    if name == "south":
        x[:, 1] = 14.62
    return pd.DataFrame(x, columns=COLUMNS), y


def images(name: str, size: int = 30) -> tuple[Any, Any]:
    """Return images of one site."""
    generator = np.random.default_rng(sum(name.encode()))
    x = generator.uniform(0, 200, (size, 1, 6, 6)).astype(np.float32)
    return x, np.where(x.mean((1, 2, 3)) > 100, "bright", "dark")


def colours(name: str, size: int = 30) -> tuple[Any, Any]:
    """Return images of one site with their channels last."""
    x = images(name, 3 * size)[0].reshape(size, 3, 6, 6).transpose(0, 2, 3, 1)
    x = np.tile(x / 200, (1, 3, 3, 1)).astype(np.float32)
    return x, np.where(x[..., 0].mean((1, 2)) > x[..., 2].mean((1, 2)), "red", "blue")


def gaps(name: str, size: int = 40) -> tuple[Any, Any]:
    """Return a table of one site with gaps, and a code in place of a number."""
    rows, y = table(name, size)
    generator = np.random.default_rng(sum(name.encode()))
    rows["ward"] = generator.choice([1.0, 2.0, 4.0], size)
    return rows.mask(generator.random(rows.shape) < 0.2), y


FILLED = {"ward": [1, 2, 3]}
BOUNDS = {"age": (0, 120), "dose": (0, 400), "seconds": (1.6e9, 1.8e9)}
CASES = {
    "as they come": (table, "none", FedAvg(model="linear", rounds=2)),
    "own numbers": (table, "client", CFL(model="mlp-32", rounds=4, mask="none")),
    "own numbers and models": (table, "client", FineTune(rounds=2, tune_rounds=1)),
    "public bounds": (table, BOUNDS, IFCA(k=2, model="linear", rounds=3)),
    "gaps, own numbers": (gaps, "client", FedAvg(model="linear", rounds=2)),
    "gaps, public bounds": (gaps, BOUNDS, FedAvg(model="linear", rounds=2)),
    "shared numbers": (
        table,
        ("shared", BOUNDS),
        CFL(model="mlp-32", rounds=4, mask="permutation"),
    ),
    "gaps, shared numbers": (
        gaps,
        ("shared", BOUNDS),
        FedAvg(model="linear", rounds=2, aggregation="secagg", target_epsilon=8),
    ),
    "shared quantiles": (
        table,
        ("shared-quantiles", BOUNDS),
        CFL(model="mlp-32", rounds=4, mask="permutation"),
    ),
    "gaps, shared quantiles": (
        gaps,
        ("shared-quantiles", BOUNDS),
        FedAvg(model="linear", rounds=2, aggregation="secagg", target_epsilon=8),
    ),
    "images, own numbers": (images, "client", FedAvg(model="linear", rounds=2)),
    "images, public bounds": (images, (0, 150), FedAvg(model="linear", rounds=2)),
    "channels last": (colours, "none", FedAvg(model="linear", rounds=2)),
    "channels last, own numbers": (colours, "client", FineTune(rounds=2, tune_rounds=1)),
    "channels last, public bounds": (colours, (0, 150), FedAvg(model="cnn-ali", rounds=1)),
}


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # of the scales, and of the exporter of graphs
def test_all_ways_to_a_prediction_answer_alike(case: str, tmp_path: Path) -> None:
    make, scaling, protocol = CASES[case]
    sites = {name: make(name) for name in ("north", "south", "west")}
    classes = {images: ["bright", "dark"], colours: ["blue", "red"]}.get(make, ["sick", "well"])
    prepare = FILLED if make is gaps else None
    how: Any = {"scaling": scaling, "prepare": prepare, "classes": classes}
    how["channels"] = "last" if make is colours else "first"
    prepared = scaling != "none" or make is colours
    federation = Federation.from_arrays(sites, seed=0, **how)
    run = protocol.fit(federation, folder=tmp_path / "run")
    kind: type[ClusteringProtocol] = type(protocol)
    guest = Federation.from_arrays({"east": make("east")}, seed=0, **how)
    run.join(guest)
    loaded = kind.load(tmp_path / "run")
    names = [*federation.names, "east"]
    rows, _ = make("new")
    x = torch.as_tensor(np.asarray(rows))
    expected = {name: run.predict_samples(name, rows).tolist() for name in names}
    # what the run itself measured is what its clients get
    for k, name in enumerate(federation.names):
        shard = federation.shards[k]
        module: Any = run.module_of(name)
        own = module.network if prepared else module
        held_out = torch.as_tensor(shard.test_samples)
        for column, (mean, deviation) in enumerate(
            zip(*run.kept_.learned.network.scale, strict=True)
        ):
            held_out[:, column] = (held_out[:, column] - mean) / deviation
        answers = own(held_out.nan_to_num().float()).argmax(1).numpy()
        score = (answers == shard.y_test).mean()
        assert score == pytest.approx(run.accuracy_[k])
    for name in names:
        answers = run.module_of(name)(x if prepared else x.float()).argmax(1).numpy()
        assert run.classes_[answers].tolist() == expected[name]
        assert loaded.predict_samples(name, rows).tolist() == expected[name]
    run.export(tmp_path / "out", clients=names)
    np.save(tmp_path / "out" / "samples.npy", x.numpy())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        cwd=tmp_path / "out",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.replace("'", '"') for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in lines] == list(expected.values())
    if all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        import onnxruntime as runtime

        loaded.export(tmp_path / "onnx", clients=names, format="onnx")
        content = json.loads((tmp_path / "onnx" / "clusters.json").read_text())
        samples = (x.double() if prepared else x.float()).numpy()
        for name in names:
            session = runtime.InferenceSession(str(tmp_path / "onnx" / content["own"][name]))
            outputs = session.run(None, {"samples": samples})[0]
            assert run.classes_[outputs.argmax(1)].tolist() == expected[name]


@pytest.fixture(scope="module")
def own() -> FedAvg:
    """Return a run whose clients scaled their features by numbers of their own."""
    sites = {name: table(name) for name in ("north", "south")}
    federation = Federation.from_arrays(sites, scaling="client", seed=0)
    return FedAvg(model="linear", rounds=10, lr=1.0).fit(federation)


def test_a_client_s_numbers_are_in_its_own_export_alone(own: FedAvg, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    own.export(tmp_path, clients=["north"])
    mean = own.kept_.clients.extra[SCALES][0, 0]
    for path in tmp_path.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            is_own = path.name == "client0.safetensors"
            assert ("prepare.centre" in tensors) == is_own
        else:
            assert not any(str(value) in path.read_text() for value in mean.tolist())
    loader = loader_of(tmp_path)
    assert torch.equal(loader.load("north").centre, mean)
    for asked in ({"client": "south"}, {"cluster": 0}):
        with pytest.raises(ValueError, match=r"are beside its own model alone: export it with"):
            loader.load(**asked)


def loader_of(folder: Path) -> Any:
    """Return the loader of an export as a module."""
    spec = importlib.util.spec_from_file_location("load_own", folder / "load.py")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    return loader


def notes(answer: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return what a function warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer(*arguments)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("scaling", ["none", "client", BOUNDS], ids=["none", "client", "bounds"])
@pytest.mark.filterwarnings("ignore")  # of the scales
def test_far_values_are_noted_on_every_way(scaling: Any, tmp_path: Path) -> None:
    has_gaps = scaling != "none"
    sites = {name: gaps(name) for name in ("north", "south")}
    if not has_gaps:
        sites = {name: (x.fillna(1.0), y) for name, (x, y) in sites.items()}
    how: Any = {"scaling": scaling, "prepare": FILLED if has_gaps else None}
    run = FedAvg(model="linear", rounds=1).fit(Federation.from_arrays(sites, seed=0, **how))
    run.export(tmp_path, clients=["north"])
    loader = loader_of(tmp_path)
    near = sites["north"][0].fillna({"age": 50.0, "dose": 200.0, "seconds": 1.7e9})
    near["ward"] = near["ward"].where(near["ward"].isin([1, 2]), 2.0)
    strange: list[dict[str, float]] = [{}, {"age": 1e4}, *([{"ward": 3.5}] if has_gaps else [])]
    for other in strange:
        rows = near.assign(**other)
        x = torch.as_tensor(rows.to_numpy())
        said = notes(run.predict_samples, "north", rows)
        said += notes(loader.predict, loader.load("north"), x)
        if has_gaps:  # else the module is the network alone
            said += notes(run.module_of("north"), x)
        assert len(said) == len(other) * (2 + has_gaps)
        assert all("40 of 40 rows lie far outside of what the client trained" in s for s in said)


def test_what_was_constant_at_a_client_decides_nothing_there(own: FedAvg) -> None:
    rows, _ = table("new")
    rows["seconds"] = table("south")[0]["seconds"]
    with pytest.warns(SecureClusterWarning, match=r"of 40 rows .*'dose' \(.*14.62 to 14.62\)"):
        found = own.predict_proba("south", rows)
    with pytest.warns(SecureClusterWarning):
        other = own.predict_proba("south", rows.assign(dose=1e6))
    assert (found == other).all() and len(np.unique(found)) > 2


def test_a_newcomer_has_the_model_of_its_cluster_and_its_own_numbers(tmp_path: Path) -> None:
    sites = {name: table(name) for name in ("north", "south", "east")}
    federation = Federation.from_arrays(sites, scaling="client", seed=0)
    run = FedAvg(model="linear", rounds=3).fit(federation.select(["north", "south"]))
    with pytest.raises(UsageError, match="there is no client 'east'"):
        run.predict_samples("east", sites["east"][0])
    run.join(federation.select(["east"]))
    shard = federation.shards[2]
    logits = shard.x_test @ run.models_[0]["1.weight"].numpy().T + run.models_[0]["1.bias"].numpy()
    module: Any = run.module_of("east")
    mean, _ = run.result_._guests["east"].own[SCALES]
    assert module.centre.tolist() == mean == list(shard.scale.centre)  # type: ignore[union-attr]
    assert np.allclose(module.network(torch.as_tensor(shard.x_test)).detach(), logits, atol=1e-5)
    run.save(tmp_path)
    path = tmp_path / "newcomers.json"
    assert path.stat().st_mode & 0o77 == 0
    rows, y = sites["east"]
    loaded = FedAvg.load(tmp_path)
    assert loaded.score("east", rows, y) == run.score("east", rows, y)
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(RunFolderError, match=r"newcomers.json differs from what was written"):
        FedAvg.load(tmp_path)
