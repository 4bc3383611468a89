"""Imports point down only, and the command line answers without loading torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    {"errors", "backend", "randomness"},
    {"checks", "parties"},
    {"files", "messages", "state", "similarity", "clustering", "metrics", "optimizers", "dropout", "devices", "objectives"},
    {"grid_noise", "clipping", "batches", "manifest", "digests", "bounds", "significance"},
    {"wire", "stacks", "data", "distances", "hierarchy", "recurrent", "separation", "training", "spectra", "components", "pretrained"},
    {"lcss", "kernels", "walks", "pair_network", "partitions", "profiles"},
    {"sequence_networks"},
    {"networks", "flat"},
    {"models", "per_example"},
    {"evaluation", "features", "estimator"},
    {"cohort", "transcript"},
    {"chance"},
    {"transport", "privacy", "settings"},
    {"endpoint", "run", "replies", "noisy_gram"},
    {"costs"},
    {"network", "noisy_losses"},
    {"displacements"},
    {"briefs"},
    {"averaging", "banks", "tree"},
    {"looks", "refiner", "hierarchical", "layers"},
    {"nearness", "relevance"},
    {"refinement", "synthetic"},
    {"protocols"},
    {"app"},
    {"benchmarks"},
]
SHARED = ("base", "agreed", "briefly", "method", "private", "assembly", "saving", "newcomers")  # of protocols: what every method stands on
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
FILES = [p for folder in ("securecluster", "protocols", "benchmarks") for p in sorted((ROOT / folder).rglob("*.py"))]


def room(module: str) -> str | None:
    """The room a module of the package lies in; None for the package's own front door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    named = parts if parts[0] == "securecluster" else ("securecluster", *parts)
    return ".".join(p for p in named if p != "__init__")


def imported(source: str) -> list[str]:
    """The modules of this package that a source imports, also within functions and for type checkers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"securecluster.{a.name}" for a in node.names] if node.module == "securecluster" else [node.module]
    return [m for m in found if m.split(".")[0] == "securecluster" and room(m) in RANK]


def upward(module: str, source: str) -> list[str]:
    """What a module imports from its own height or above, its own room aside."""
    here = room(module)
    if here is None or here.startswith("__"):
        return []
    wrong = [m for m in imported(source) if room(m) != here and RANK[str(room(m))] >= RANK[here]]
    if here == "protocols" and module.split(".")[-1] not in ("protocols", *SHARED):
        wrong += [m for m in imported(source) if room(m) == "protocols" and m.split(".")[-1] not in ("base", "briefly")]
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    assert room(module) in RANK or room(module) is None or str(room(module)).startswith("__"), f"{module} has no layer"
    assert upward(module, path.read_text()) == []


def test_the_check_can_fail() -> None:
    assert upward("securecluster.messaging.wire", "from securecluster.runtime.server_channel import Network")
    assert upward("securecluster.training.local_trainer", "def f():\n    import securecluster.protocols.cfl.protocol")
    assert upward("securecluster.protocols.cfl.protocol", "from securecluster.protocols.fedavg import FedAvg")
    assert not upward("securecluster.protocols.cfl.protocol", "from securecluster.protocols.common.base import Protocol")


def test_protocol_names_are_known_to_the_app_alone() -> None:
    for path in FILES:
        if path.is_relative_to(ROOT / "securecluster") and "app" not in path.parts:
            assert "securecluster.protocols" not in "".join(imported(path.read_text())), path


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    code = """
import sys
import securecluster.protocols
from securecluster.app.cli import main
assert main(["run", "cfl", "--help"]) == 0 and main(["run", "cfl", "--mask", "x"]) == 2
heavy = {"torch", "scipy", "sklearn", "matplotlib"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
