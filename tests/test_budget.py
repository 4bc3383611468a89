"""What the house may weigh: code lines a room, files a folder, imports, members, frames, words.

Figures are those that the house has, and may fall freely; whoever raises one says in the commit
what users get for it.
"""

from __future__ import annotations

import ast
import io
import tokenize
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
    ".ci": 1090,
    "attacks": 6080,
    "benchmarks": 18360,
    "protocols": 1710,
    "protocols/cfl": 1000,
    "protocols/common": 4990,
    "protocols/conformance": 1860,
    "protocols/flux": 480,
    "protocols/hidden": 1000,
    "protocols/ifca": 770,
    "protocols/nsim": 1310,
    "protocols/oneshot": 1060,
    "protocols/srfca": 1420,
    "securecluster": 410,
    "securecluster/app": 8790,
    "securecluster/clustering": 1890,
    "securecluster/core": 1510,
    "securecluster/data": 4510,
    "securecluster/messaging": 1850,
    "securecluster/models": 2100,
    "securecluster/privacy": 5030,
    "securecluster/protections": 5020,
    "securecluster/runs": 11390,
    "securecluster/runtime": 3510,
    "securecluster/training": 1740,
    "tests": 71500,
}
MOST_FILES = 25  # in a folder
CROWDED = {
    "attacks": 40,  # one an attack
    "benchmarks": 69,
    "benchmarks/papers": 30,
    "protocols/common": 37,
    "securecluster/app": 49,
    "securecluster/runs": 72,
    "securecluster/runtime": 27,
    "tests/app": 49,
    "tests/attacks": 30,
    "tests/benchmarks": 39,
    "tests/protocols": 56,
    "tests/runs": 34,
}
FILES_NEEDED = {
    "protocols/fedavg.py": 205,
    "protocols/cfl/protocol.py": 232,
    "securecluster/results/predictions.py": 157,
    "securecluster/parties/method.py": 94,
}
MOST_WORDS = {
    "README.md": 1180,
    "ARCHITECTURE.md": 1930,
    "docs/*.md": 47100,
    "docs/evidence/*.md": 89290,
}
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}


def sources(*tops: str) -> Iterator[Path]:
    """Yield the Python files below folders of the project."""
    for top in tops:
        yield from sorted((ROOT / top).rglob("*.py"))


def code_lines(source: str) -> int:
    """Count lines with code: no blanks, comments, docstrings, nor strings below fields."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def room_of(path: Path) -> str:
    """Return the room of a file: its top folder, or that and the next one in the library."""
    parts = path.relative_to(ROOT).parts
    in_room = parts[0] in ("securecluster", "protocols") and len(parts) > 2
    return "/".join(parts[:2]) if in_room else parts[0]


def module_of(path: Path) -> str:
    """Return the module that a file of the library is imported as."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    whole = parts if parts[0] == "securecluster" else ("securecluster", *parts)
    return ".".join(part for part in whole if part != "__init__")


def loaded_with(source: str, known: dict[str, Path]) -> Iterator[Path]:
    """Yield the files of the library whose names a file imports as soon as it is loaded."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names = [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
        else:
            continue
        for choices in names:
            yield from [known[name] for name in choices if name in known][:1]


def files_needed(start: str) -> set[Path]:
    """Return the files of the library that are loaded for a file, its own included."""
    known = {module_of(path): path for path in sources(*LIBRARY)}
    seen: set[Path] = set()
    left = [ROOT / start]
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            left += loaded_with(path.read_text(), known)
    return seen


def public_members(owner: object) -> list[str]:
    """Return the names that completion offers."""
    return [name for name in dir(owner) if not name.startswith("_")]


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


@pytest.mark.parametrize(("start", "most"), FILES_NEEDED.items())
def test_a_file_needs_few_others(start: str, most: int) -> None:
    assert len(files_needed(start)) <= most


@pytest.mark.parametrize(("pages", "most"), MOST_WORDS.items())
def test_documents_have_few_words(pages: str, most: int) -> None:
    assert sum(len(page.read_text().split()) for page in ROOT.glob(pages)) <= most


def test_what_a_user_gets_has_at_most_40_public_members() -> None:
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    for kind in (FedAvg, CFL):
        fitted = kind(rounds=1, model="linear", epochs=1).fit(federation)
        assert len(public_members(fitted.result_)) <= 40


@pytest.mark.parametrize(("kind", "members"), [(ClusteringProtocol, 30), (FedAvg, 31), (CFL, 44)])
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
