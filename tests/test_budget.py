"""What the house may weigh: code lines a room, files a folder, imports, members, frames, words.

Figures are those that the house has, and may fall freely; whoever raises one says in the commit
what users get for it.
"""

from __future__ import annotations

import ast
import pydoc
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import securecluster
from securecluster import FedAvg, Federation, protocols
from securecluster.cli.main import main
from securecluster.models.fused_layers import Stack
from securecluster.protocols import CFL
from securecluster.protocols.common.base import ClusteringProtocol

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(Path(str(package.__file__)).parent) for package in (securecluster, protocols))
LIBRARY = ("securecluster", "protocols", "attacks")
CODE_LINES = {
    ".ci": 660,
    "attacks": 7300,
    "benchmarks": 15920,
    "protocols": 760,
    "protocols/cfl": 1100,
    "protocols/common": 5340,
    "protocols/conformance": 1810,
    "protocols/contrib": 1210,
    "protocols/hidden": 1350,
    "protocols/ifca": 750,
    "protocols/nsim": 1300,
    "protocols/oneshot": 1050,
    "protocols/srfca": 1460,
    "securecluster": 270,
    "securecluster/audits": 2690,
    "securecluster/cli": 1810,
    "securecluster/clustering": 2060,
    "securecluster/commands": 630,
    "securecluster/core": 1880,
    "securecluster/data": 6290,
    "securecluster/figures": 830,
    "securecluster/folders": 840,
    "securecluster/messaging": 1900,
    "securecluster/models": 2620,
    "securecluster/nodes": 2630,
    "securecluster/parties": 2290,
    "securecluster/privacy": 5320,
    "securecluster/protections": 4820,
    "securecluster/recordings": 1090,
    "securecluster/reports": 1590,
    "securecluster/results": 2210,
    "securecluster/runs": 760,
    "securecluster/runtime": 3490,
    "securecluster/statements": 1610,
    "securecluster/studies": 4430,
    "securecluster/training": 2150,
    "tests": 76260,
}
MOST_FILES = 25  # in a folder
CROWDED = {
    "attacks": 43,  # one an attack
    "tests/attacks": 32,  # one an attack
}
FILES_NEEDED = {
    "securecluster.protocols.fedavg": 120,
    "securecluster.protocols.cfl.protocol": 163,
    "securecluster.results.predictions": 60,
    "securecluster.parties.method": 2,
}
NOT_OF_FEDAVG = (
    "audits",
    "nodes",
    "protections.encryption",
    "protections.pads",
    "protections.secure_sums",
    "reports",
    "studies",
)
MOST_WORDS = {
    "README.md": 900,
    "ARCHITECTURE.md": 1990,
    "docs/*.md": 44900,
    "docs/evidence/*.md": 26240,
}


def sources(*tops: str) -> Iterator[Path]:
    """Yield the Python files below folders of the project."""
    for top in tops:
        yield from sorted((ROOT / top).rglob("*.py"))


def code_lines(source: str) -> int:
    """Count lines with code: no blanks, comments, docstrings, nor strings below fields."""
    lines = set()
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            lines.add(number)
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # with its blank lines
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines - texts)


def room_of(path: Path) -> str:
    """Return the room of a file: its top folder, or that and the next one in the library."""
    parts = path.relative_to(ROOT).parts
    in_room = parts[0] in ("securecluster", "protocols") and len(parts) > 2
    return "/".join(parts[:2]) if in_room else parts[0]


def public_members(owner: object) -> list[str]:
    """Return the names that completion offers."""
    return [name for name in dir(owner) if not name.startswith("_")]


@pytest.mark.always
def test_no_room_weighs_more_than_its_budget() -> None:
    weights: Counter[str] = Counter()
    for path in sources(*LIBRARY, "benchmarks", "tests", ".ci"):
        weights[room_of(path)] += code_lines(path.read_text())
    assert weights.keys() == CODE_LINES.keys()
    heavy = {room: lines for room, lines in weights.items() if lines > CODE_LINES[room]}
    assert heavy == {}


def test_no_folder_is_crowded() -> None:
    counts = Counter(
        str(path.parent.relative_to(ROOT)) for path in sources(*LIBRARY, "benchmarks", "tests")
    )
    crowded = {
        folder: count for folder, count in counts.items() if count > CROWDED.get(folder, MOST_FILES)
    }
    assert crowded == {}


def files_loaded(statement: str) -> list[str]:
    """Return the library's modules that a process loads for a statement, without packages."""
    code = f"""
import sys
{statement}
for name, module in sys.modules.items():
    if name.startswith("securecluster.") and not hasattr(module, "__path__"):
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(("module", "most"), FILES_NEEDED.items())
def test_a_module_loads_few_others(module: str, most: int) -> None:
    assert len(files_loaded(f"import {module}")) <= most


def test_fedavg_loads_no_protection_flower_plan_or_audit() -> None:
    rooms = tuple(f"securecluster.{room}" for room in NOT_OF_FEDAVG)
    loaded = files_loaded("from securecluster import FedAvg; FedAvg()")
    assert not [name for name in loaded if name.startswith(rooms)]


@pytest.mark.parametrize(("pages", "most"), MOST_WORDS.items())
def test_documents_have_few_words(pages: str, most: int) -> None:
    assert sum(len(page.read_text().split()) for page in ROOT.glob(pages)) <= most


def test_what_fit_returns_has_at_most_40_public_names_beside_options() -> None:
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    for kind in (FedAvg, CFL):
        fitted = kind(rounds=1, model="linear", epochs=1).fit(federation)
        names = set(public_members(fitted)) - fitted.get_params().keys()
        assert len(names) <= 39, sorted(names)  # and joined_ after newcomers
        assert names <= set(dir(fitted.result_)) | set(dir(kind)) | {"result_"}
        hidden = ("dry_runs", "frame_sizes", "make_client", "verb_outcomes", "training")
        assert not {"fit", "labels_", "lr"} - set(dir(fitted)) and not names & {*hidden}
        text = pydoc.plain(pydoc.render_doc(kind))
        assert "fit(self, federation" in text and "labels_: each" in text
        assert not [name for name in hidden if f"\n |  {name}(" in text]


@pytest.mark.parametrize(("kind", "members"), [(ClusteringProtocol, 30), (FedAvg, 10), (CFL, 22)])
def test_what_an_author_derives_from_does_not_grow(kind: Any, members: int) -> None:
    assert len(public_members(kind)) <= members


def test_few_frames_lie_between_the_command_and_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stacks: list[list[str]] = []
    step = Stack.step

    def counting(*arguments: Any) -> None:
        stacks.append([frame.filename for frame in traceback.extract_stack()])
        step(*arguments)

    monkeypatch.setattr(Stack, "step", counting)
    small = ["--rounds", "2", "--clients", "4", "--threads", "1", "--quiet"]
    assert main(["run", "cfl", *small, "--out", str(tmp_path / "run")]) == 0
    own = [name for name in stacks[0] if name.startswith(FOLDERS)]
    assert len(own) <= 20
