"""The examples of docs/other-frameworks.md as apps in Flower's simulation."""

from __future__ import annotations

import json
import runpy
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from securecluster import Federation, LabelSwap
from securecluster.cli.main import main
from securecluster.clustering.metrics import agreement

pytest.importorskip("flwr", reason="needs the extra flower")
pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[2]
READER = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "readme.py")))
PAGE = ROOT / "docs" / "other-frameworks.md"
# what a user adds to the functions: the protocol, here of fewer rounds, and a client's data
LOAD = """

from securecluster import Federation, LabelSwap

protocol = {protocol}


def load(number, clients):
    scenario = LabelSwap(clusters=2)
    everyone = Federation.simulate("digits", scenario=scenario, clients=clients, samples=60, seed=0)
    return everyone.select([number])
"""
# the examples by what begins them
APPS = {
    "sklearn": ("from sklearn", "signature.set_params(rounds=2)"),
    "jax": ("import jax.numpy", "ifca.set_params(rounds=4, starts=1)"),
}


@pytest.mark.parametrize("name", APPS)
def test_the_example_is_an_app_of_flower(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    begins, protocol = APPS[name]
    (text,) = [block.text for block in READER.blocks(PAGE) if begins in block.text]
    # of another name each: one SuperLink carries out both, whose workers import them by name
    package = f"wards_of_{name}"
    project = tmp_path / package
    assert main(["flower-init", str(project)]) == 0
    (project / package / "task.py").write_text(text + LOAD.format(protocol=protocol))
    for variable in ("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "FLWR_DISABLE_UPDATE_CHECK"):
        monkeypatch.setenv(variable, "1")
    command = ["flwr", "run", ".", "local", "--stream"]
    command += ["--federation-config", "num-supernodes=8", "--run-config", "clients=8"]
    ran = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    result: dict[str, Any] = json.loads((project / "runs/first/result.json").read_text())
    scenario = LabelSwap(clusters=2)
    truth = Federation.simulate(scenario=scenario, clients=8, samples=60, seed=0).truth
    assert truth is not None
    assert agreement(result["labels"], truth)["ari"] == 1.0
