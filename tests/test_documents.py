"""ARCHITECTURE.md and CONTRIBUTING.md name files, tests, modules and functions that exist, and the
rooms of the former are those of `test_architecture.py`.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("ARCHITECTURE.md", "CONTRIBUTING.md")
DOCUMENTS = {name: (ROOT / name).read_text() for name in NAMES}
ARCHITECTURE_TEST = ROOT / "tests" / "test_architecture.py"
WIDEST = 100  # columns
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"\.?\w[\w.-]*/[\w./-]*|[\w./-]+\.(?:md|py|toml)")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.py")
TEST = re.compile(r"(tests/[\w/]+\.py)|::(test_\w+)")
MODULE = re.compile(r"\bsecurecluster(?:\.\w+)+")
DEFINED = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`\s+\(`([\w/]+\.py)`")
EVERYWHERE = ("core", "errors")  # rooms that the table of rooms leaves out


@cache
def parsed(path: Path) -> ast.Module:
    """Return a source's syntax tree."""
    return ast.parse(path.read_text())


def named_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what a module or class defines, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def is_defined(path: Path, name: str) -> bool:
    """Return whether a file defines a dotted name, such as a method of a class."""
    body = parsed(path).body
    for part in name.split("."):
        found = named_in(body).get(part)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def is_module(name: str) -> bool:
    """Return whether a module's dotted name leads to a file or a folder."""
    _, *parts = name.split(".")
    home = ROOT if parts[0] in ("protocols", "benchmarks") else ROOT / "securecluster"
    place = home.joinpath(*parts)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def paths(text: str) -> set[str]:
    """Return the files and folders that a document names."""
    spans = {span for span in SPAN.findall(FENCED.sub("", text)) if PATH.fullmatch(span)}
    return spans | set(FILE.findall(text))


def references(text: str) -> Iterator[tuple[str, str]]:
    """Yield (file, test) of each test that a document names; `::test` is in the last file named."""
    file = ""
    for path, name in TEST.findall(text):
        file = path or file
        if name:
            yield file, name


def mistakes(text: str) -> list[str]:
    """Return what a document names that is not there."""
    absent = [path for path in sorted(paths(text)) if not (ROOT / path).exists()]
    for file, name in references(text):
        if not (ROOT / file).is_file() or not is_defined(ROOT / file, name):
            absent.append(f"{file}::{name}")
    absent += [name for name in sorted(set(MODULE.findall(text))) if not is_module(name)]
    for name, file in DEFINED.findall(text):
        if not (ROOT / file).is_file() or not is_defined(ROOT / file, name):
            absent.append(f"{name} ({file})")
    return absent


def section(text: str, title: str) -> str:
    """Return the part of a document under a heading of the second level."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def decisions(text: str) -> list[str]:
    """Return the bullets of the section Decisions."""
    return re.split(r"^- ", section(text, "Decisions"), flags=re.MULTILINE)[1:]


def rooms(text: str) -> dict[str, set[str]]:
    """Return the room that each row of the table of rooms is about, and what it may import."""
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]+) \|$", section(text, "Rooms"), re.MULTILINE)
    names = [name for name, _ in rows]
    found: dict[str, set[str]] = {}
    for place, (name, cell) in enumerate(rows):
        below = set(names[place + 1 :])
        given = below if cell == "all below" else set(cell.split(", ")) - {"–"}
        found[name] = given | (set(EVERYWHERE) & below)
    return found


def rule() -> dict[str, set[str]]:
    """Return what `test_architecture.py` lets each room import."""
    found: dict[str, set[str]] = runpy.run_path(str(ARCHITECTURE_TEST))["MAY_IMPORT"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_a_document_names_exists(name: str) -> None:
    assert mistakes(DOCUMENTS[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_lines_have_at_most_100_columns(name: str) -> None:
    assert [line for line in DOCUMENTS[name].splitlines() if len(line) > WIDEST] == []


def test_every_decision_names_its_test_or_says_that_there_is_none() -> None:
    found = decisions(DOCUMENTS["ARCHITECTURE.md"])
    assert len(found) > 60
    silent = [own for own in found if "::test_" not in own and "No test holds this" not in own]
    assert silent == []


def test_the_table_of_rooms_is_the_rule() -> None:
    assert rooms(DOCUMENTS["ARCHITECTURE.md"]) == rule()


def test_the_documents_name_something() -> None:
    text = DOCUMENTS["ARCHITECTURE.md"]
    assert {"protocols/cfl/protocol.py", ".ci/run", "protocols/", "pyproject.toml"} <= paths(text)
    assert len(set(references(text))) > 100
    assert "securecluster.benchmarks.fuzz" in MODULE.findall(text)
    assert ("CFL.run_server", "protocols/cfl/protocol.py") in DEFINED.findall(text)


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("see `securecluster/runtime/run.py` and `tests/`", []),
        ("see securecluster/runtime/walk.py", ["securecluster/runtime/walk.py"]),
        ("see `securecluster/walks/`", ["securecluster/walks/"]),
        ("see `NOTES.md`", ["NOTES.md"]),
        ("`tests/test_documents.py::test_the_checks_can_fail`", []),
        (
            "`tests/test_documents.py`\n`::test_of_nothing`",
            ["tests/test_documents.py::test_of_nothing"],
        ),
        ("`::test_of_no_file`", ["::test_of_no_file"]),
        ("securecluster.benchmarks.golden in securecluster.protocols.cfl", []),
        ("securecluster.runtime.walk", ["securecluster.runtime.walk"]),
        ("`Run.rounds` (`securecluster/runtime/run.py`)", []),
        (
            "`Run.walk` (`securecluster/runtime/run.py`)",
            ["Run.walk (securecluster/runtime/run.py)"],
        ),
    ],
)
def test_the_checks_can_fail(text: str, absent: list[str]) -> None:
    assert mistakes(text) == absent


def test_a_wrong_row_is_not_the_rule() -> None:
    text = DOCUMENTS["ARCHITECTURE.md"]
    wrong = text.replace("transforms, scenarios, the federation | models |", "… | clustering |")
    assert wrong != text
    assert rooms(wrong) != rule()
