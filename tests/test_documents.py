"""The documents name files, tests, modules and functions that exist, their links lead somewhere,
and the rooms of ARCHITECTURE.md are those of `test_architecture.py`.
"""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from securecluster.protocols.registry import PROTOCOLS

# entry points, and a function
GROUPS = {f"securecluster.{name}" for name in ("masks", "claims", "scores", "fields")}
NO_MODULES = {*GROUPS, "securecluster.audit"}
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
EVIDENCE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/evidence").glob("*.md"))
NAMES = (
    "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "README.md", "SECURITY.md", *PAGES,
)  # fmt: skip
DOCUMENTS = {name: (ROOT / name).read_text() for name in (*NAMES, *EVIDENCE)}
# all Markdown files, whose links are followed
LINKED = (
    *(path.name for path in sorted(ROOT.glob("*.md"))),
    *(
        str(path.relative_to(ROOT))
        for folder in ("docs", "securecluster", "protocols", "attacks", "benchmarks", "tests")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
)
# other documents also name files of run folders and data sets
ONLY_OF_THIS_PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md")
TOP = ("securecluster", "protocols", "attacks", "benchmarks", "tests", "docs", ".ci")
PARTS = ["Idea", "Options", "What is disclosed", "Deviations from the paper"]
ARCHITECTURE_TEST = ROOT / "tests" / "test_architecture.py"
WIDEST = 100  # columns
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"\.?\w[\w.-]*/[\w./-]*|[\w./-]+\.(?:md|py|toml)")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.py")
TEST = re.compile(r"(tests/[\w/]+\.py)|::(test_\w+)")
MODULE = re.compile(r"\b(?:securecluster|benchmarks)(?:\.\w+)+")
LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)")
REFERENCE = re.compile(r"^\[[^]]+\]: (?!http)([^\s#]*)(?:#(\S+))?$", re.MULTILINE)
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
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
    """Return whether a module's dotted name leads to a file or a folder, or is none."""
    if name in NO_MODULES:
        return True
    parts = name.split(".")
    if parts[:2] in (["securecluster", "protocols"], ["securecluster", "attacks"]):
        parts = parts[1:]
    place = ROOT.joinpath(*parts)
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


def mistakes(text: str, tops: Collection[str] | None = None) -> list[str]:
    """Return what a document names that is not there.

    Args:
        text: of the document.
        tops: the folders whose files are looked for; None looks for all files.
    """
    named = sorted(paths(text))
    if tops is not None:
        named = [path for path in named if path.split("/")[0] in tops]
    absent = [path for path in named if not (ROOT / path).exists()]
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


def bullets(text: str, title: str) -> list[str]:
    """Return the bullets of a section."""
    return re.split(r"^- ", section(text, title), flags=re.MULTILINE)[1:]


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


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {word.replace(" ", "-") for word in words}


def dead_links(name: str, text: str) -> list[str]:
    """Return the links of a document that lead to no file, or to no heading of one.

    Args:
        name: path of the document.
        text: its content.
    """
    dead = []
    for path, anchor in [*LINK.findall(text), *REFERENCE.findall(text)]:
        target = (ROOT / name).parent / path if path else ROOT / name
        known = not anchor or (target.is_file() and anchor in anchors(target.read_text()))
        if not target.exists() or not known:
            dead.append(f"{path}#{anchor}")
    return dead


@pytest.mark.parametrize("name", NAMES)
def test_what_a_document_names_exists(name: str) -> None:
    assert mistakes(DOCUMENTS[name], None if name in ONLY_OF_THIS_PROJECT else TOP) == []


def test_all_documents_are_among_the_files_whose_links_are_followed() -> None:
    assert set(DOCUMENTS) <= set(LINKED)


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_somewhere(name: str) -> None:
    assert dead_links(name, (ROOT / name).read_text()) == []


@pytest.mark.parametrize("folder", ["securecluster", "protocols", "attacks", "benchmarks", "tests"])
def test_pages_that_code_names_exist(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path == Path(__file__):
            continue  # it also names pages that are not there
        gone = [page for page in PAGE.findall(path.read_text()) if not (ROOT / page).is_file()]
        assert gone == [], path


@pytest.mark.parametrize("name", [*NAMES, *EVIDENCE])
def test_lines_have_at_most_100_columns(name: str) -> None:
    text = re.sub(r"^<!-- table.*?-->", "", DOCUMENTS[name], flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```text.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]  # no cell can be cut
    assert [line for line in lines if len(line) > WIDEST] == []


def test_the_readme_is_short() -> None:
    text = DOCUMENTS["README.md"]
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 900


def test_every_protocol_has_a_link_a_line_in_the_table_and_four_parts() -> None:
    linked = re.findall(r"\[`([\w-]+)`\]\(docs/protocols\.md#", DOCUMENTS["README.md"])
    rows = re.findall(r"^\| `([\w-]+)` \|.*\]\(#", DOCUMENTS["docs/protocols.md"], re.MULTILINE)
    assert sorted(linked) == sorted(rows) == sorted(PROTOCOLS)
    _, *sections = re.split(r"^## ", DOCUMENTS["docs/protocols.md"], flags=re.MULTILINE)
    names = [re.search(r"^`([\w-]+)`: ", text, re.MULTILINE) for text in sections]
    assert sorted(name[1] for name in names if name) == sorted(PROTOCOLS)
    for text in sections:
        assert re.findall(r"^\*\*([^*]+)\.\*\*", text, re.MULTILINE) == PARTS, text[:20]


def test_dead_links_are_found() -> None:
    text = "[a](ARCHITECTURE.md) [b](docs/gone.md) [c](#there) [d](LICENSE)\n## There\n"
    text += (
        "[e](ARCHITECTURE.md#principles) [f](ARCHITECTURE.md#none)\n[g]: gone.png\n[h]: LICENSE\n"
    )
    assert dead_links("README.md", text) == [
        "docs/gone.md#",
        "#there",
        "ARCHITECTURE.md#none",
        "gone.png#",
    ]


def test_the_architecture_is_read_in_a_quarter_of_an_hour() -> None:
    assert len(DOCUMENTS["ARCHITECTURE.md"].split()) <= 3500


def test_every_principle_names_the_file_that_keeps_it_and_a_test() -> None:
    found = bullets(DOCUMENTS["ARCHITECTURE.md"], "Principles")
    assert len(found) > 10
    assert [own for own in found if "::test_" not in own] == []
    assert [own for own in found if not re.search(r"`(securecluster|protocols)/", own)] == []


def test_every_place_to_change_has_its_page_and_its_test_or_says_that_there_is_none() -> None:
    found = bullets(DOCUMENTS["ARCHITECTURE.md"], "Where to change what")
    assert len(found) > 10
    silent = [own for own in found if "::test_" not in own and "No test fails by itself" not in own]
    assert silent == []
    assert [own for own in found if "](docs/" not in own] == []


def test_the_table_of_rooms_is_the_rule() -> None:
    assert rooms(DOCUMENTS["ARCHITECTURE.md"]) == rule()


def test_the_documents_name_something() -> None:
    text = DOCUMENTS["ARCHITECTURE.md"]
    assert {"protocols/cfl/protocol.py", ".ci/run", "protocols/", "pyproject.toml"} <= paths(text)
    assert len(set(references(text))) > 25
    assert "benchmarks.golden" in MODULE.findall(text)
    assert ("CFL.run_server", "protocols/cfl/protocol.py") in DEFINED.findall(text)


def test_every_file_that_the_continuous_integration_names_is_there() -> None:
    named = re.findall(
        r"(?:tests|benchmarks|\.ci)/[\w/]+\.(?:py|csv|txt)", (ROOT / ".ci/run").read_text()
    )
    assert len(set(named)) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []


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
        ("benchmarks.golden in securecluster.protocols.cfl", []),
        ("securecluster.runtime.walk", ["securecluster.runtime.walk"]),
        ("benchmarks.walk", ["benchmarks.walk"]),
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


def test_every_row_of_who_learns_what_names_its_tests_or_says_that_there_is_none() -> None:
    text = section((ROOT / "docs" / "security.md").read_text(), "Who learns what")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    notes = dict(re.findall(r"^(\d+)\. (.+(?:\n {3,}.+)*)", text, re.MULTILINE))
    assert len(rows) >= 10 and list(notes) == rows
    for note in notes.values():
        assert TEST.search(note), note
        assert "active: " not in note or "test" in note.split("active: ")[1]


def test_a_version_is_the_same_wherever_it_stands() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+) \((.*)\)$", DOCUMENTS["CHANGELOG.md"], re.MULTILINE)
    assert newest is not None and newest[1] == version
    # a release has a date, in both or in neither
    released = re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2])
    cited = "date-released:" in (ROOT / "CITATION.cff").read_text()
    assert (newest[2] == "unreleased") != (released is not None)
    assert cited == (released is not None)


def test_the_changelog_says_what_changed_left_and_touches_security() -> None:
    newest = DOCUMENTS["CHANGELOG.md"].split("\n## ")[1]
    headings = re.findall(r"^### (.*)$", newest, re.MULTILINE)
    assert headings == ["Changed", "Fixed", "Security", "Added", "Removed"]
