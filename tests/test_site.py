"""The site has every page, in its tree or beside it by intention, and a page for each protocol.

`mkdocs build --strict` in .ci/run makes it; here nothing of mkdocs is needed.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints, is_typeddict

import pytest

import securecluster
from securecluster.audits import audit_files, audit_overview
from securecluster.cli import node_command
from securecluster.core.field_docs import _own_descriptions
from securecluster.core.validation import python_only_fields
from securecluster.data.simulation import Simulation, option_name
from securecluster.folders import run_folder
from securecluster.folders import schemas as contents
from securecluster.messaging.transcript import INDEX
from securecluster.nodes import authority_node, party
from securecluster.nodes.node import ledger_of
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.reports.report_page import PAGE
from securecluster.runtime.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
SITE = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "site.py")))
TREE = re.findall(
    r"^ +- (?:[^:\n]+: )?([\w/.-]+)(?: +#.*)?$", (ROOT / "mkdocs.yml").read_text(), re.M
)
SHAPE = ["Idea", "Options", "What is disclosed", "Deviations from the paper", "Evidence"]
# pages that the tree leaves out: those of evidence, which their index links
BESIDE = "docs/evidence/"
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[^)]*\)|^\[[^]]+\]: (?!https?:)([^\s#]+)", re.M)
COMPARED = (run_folder.COMPARISON, run_folder.FAILURES)
AUDITED = (audit_files.RESULT, audit_files.PAGE)
# what a node, and a key authority, has in its folder, and in that of a run
OF_NODE = {
    node_command.IDENTITY, node_command.ROSTER, node_command.POLICY, node_command.SOCKET,
    authority_node.LOG, party.LOCK, f"run-0/{party.AGREED}", f"run-0/{party.STATE}",
    *(ledger_of(Path(), unit).name for unit in ("client", "example")),
}  # fmt: skip


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The text of every page but those of notebooks, by its path in the repository."""
    made: dict[str, str] = SITE.site()
    return made


def links(path: str, text: str) -> set[str]:
    """Return the paths that a page links, without those at other hosts."""
    targets = {one or other for one, other in LINK.findall(FENCED.sub("", text))}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), aim)) for aim in targets}


def test_every_page_is_in_the_tree_or_beside_it_by_intention(pages: dict[str, str]) -> None:
    assert {"tutorials/", "methods/"} <= set(TREE)
    made = {SITE.METHODS, *(SITE.METHOD.format(own.name) for own in SITE.sections())}
    tree = made | {path for path in TREE if path.endswith(".md")}
    assert {path for path in pages.keys() - tree if not path.startswith(BESIDE)} == set()
    assert tree - pages.keys() == set()


def test_every_document_is_a_page_at_a_place_of_its_own(pages: dict[str, str]) -> None:
    documents = set((ROOT / "docs").rglob("*.md")) | set(ROOT.glob("*.md"))
    assert {path.relative_to(ROOT).as_posix() for path in documents} <= pages.keys()
    every_page = [*pages, *(SITE.NOTEBOOK.format(path.stem) for path in SITE.notebooks())]
    assert len({SITE.place(path) for path in every_page}) == len(every_page)


def test_the_index_of_evidence_links_each_page_of_it(pages: dict[str, str]) -> None:
    index = f"{BESIDE}README.md"
    assert {path for path in pages if path.startswith(BESIDE)} <= {
        index, *links(index, pages[index])
    }  # fmt: skip


def test_every_link_leads_to_a_page_or_a_file_of_the_site(pages: dict[str, str]) -> None:
    there = {*pages, *SITE.paths(SITE.FILES)}
    there |= {SITE.NOTEBOOK.format(path.stem) for path in SITE.notebooks()}
    dead = {path: links(path, text) - there for path, text in pages.items()}
    assert {path: aims for path, aims in dead.items() if aims} == {}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_has_a_page_of_one_shape_with_its_options(
    name: str, pages: dict[str, str]
) -> None:
    page = pages[SITE.METHOD.format(name)]
    headings = re.findall(r"^## (.+)$", page, re.M)
    assert [heading for heading in headings if heading in SHAPE] == SHAPE
    described = page + pages["reference/command-line.md"]
    shared = {option.name for option in fields(ClusteringProtocol)}
    in_python = python_only_fields(protocol_class(name))
    for option in fields(protocol_class(name)):
        if option.name not in in_python:
            assert option_name(option.name) in described, option.name
        elif option.name not in shared:
            assert f"| `{option.name}`, in Python |" in page, option.name


def test_a_methods_page_links_the_evidence_that_names_it(pages: dict[str, str]) -> None:
    evidence = {
        name: pages[SITE.METHOD.format(name)].split("\n## Evidence\n")[1] for name in PROTOCOLS
    }
    assert "(evidence/srfca.md)" in evidence["srfca"]
    assert "(evidence/srfca.md)" not in evidence["nsim"]
    assert "(evidence/malicious_clients.md)" in evidence["srfca"]  # its section links it
    assert "(evidence/hidden.md)" in evidence["hidden"]


def test_options_of_every_run_are_on_the_page_of_the_command_line(pages: dict[str, str]) -> None:
    page = pages["reference/command-line.md"]
    for kind in (Simulation, Settings):
        in_python = python_only_fields(kind)
        for option in fields(kind):
            described = re.search(rf"{option_name(option.name)}(?![\w-])", page) is not None
            assert described == (option.name not in in_python), option.name


def test_every_public_name_is_on_the_page_of_python(pages: dict[str, str]) -> None:
    shown = re.findall(r"^::: securecluster\.(?:\w+\.)*(\w+)$", pages["reference/python.md"], re.M)
    assert sorted({*shown, "__version__"} - {"FittedRun"}) == sorted(securecluster.__all__)
    assert len(shown) == len(set(shown))


def test_every_entry_of_files_is_described(pages: dict[str, str]) -> None:
    assert f"\n::: {contents.__name__}\n" in pages["reference/result.md"]
    kinds = [kind for kind in vars(contents).values() if is_typeddict(kind)]
    assert len(kinds) > 10
    for kind in kinds:
        own = get_type_hints(kind).keys() - {"lambda"}  # a word of Python: the page describes it
        assert own == _own_descriptions(kind).keys(), kind
    assert "`lambda`" in pages["reference/result.md"]


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("docs/runs.md", run_folder.WRITTEN | {run_folder.LOCK, INDEX, *COMPARED}),
        ("docs/sweep.md", run_folder.SWEPT | {run_folder.CONFIG}),
        ("docs/audit.md", {PAGE, audit_overview.NAME, *(f"audit-server{e}" for e in AUDITED)}),
        ("docs/nodes.md", OF_NODE),
    ],
)
def test_every_file_that_is_written_is_named(page: str, files: set[str]) -> None:
    named = set(re.findall(r"`([\w.*/-]+)`", (ROOT / page).read_text()))
    patterns = [name for name in named if "*" in name]
    left_out = {name for name in files - named if not any(fnmatch(name, own) for own in patterns)}
    assert left_out == set()


@pytest.mark.parametrize(
    ("text", "path", "redirected"),
    [
        ("[a](docs/runs.md#x)", "README.md", "[a](docs/runs.md#x)"),
        ("[a](../protocols.md#flhc)", "docs/evidence/cfl.md", "[a](../protocols-flhc.md)"),
        ("[a](protocols.md#sr-fca)", "docs/data.md", "[a](protocols-srfca.md)"),
        (
            "[a](#gradient-signatures-in-other-protocols)", SITE.METHOD.format("cfl"),
            "[a](protocols-signature.md#gradient-signatures-in-other-protocols)",
        ),
        ("[a](audit.ipynb)", "docs/audit.md", "[a](audit-notebook.md)"),
        ("[a](https://example.org/b.md)", "README.md", "[a](https://example.org/b.md)"),
    ],
)  # fmt: skip
def test_links_to_methods_and_notebooks_lead_to_their_pages(
    text: str, path: str, redirected: str
) -> None:
    assert SITE.redirected(text, path) == redirected


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("README.md", "index.md"),
        ("docs/runs.md", "runs.md"),
        ("docs/evidence/README.md", "evidence/README.md"),
        ("docs/protocols.md", "methods/index.md"),
        (SITE.METHOD.format("local-kmeans"), "methods/local-kmeans.md"),
        (SITE.NOTEBOOK.format("audit-flower"), "tutorials/audit-flower.md"),
    ],
)
def test_pages_have_their_places_on_the_site(path: str, place: str) -> None:
    assert SITE.place(path) == place


# words of the tables of methods that need no explanation
PLAIN = {
    "alike", "alone", "best", "data", "each", "every", "example", "features", "groups",
    "kilobyte", "know", "layer", "masked", "mean", "model", "models", "move", "near", "noisy",
    "none", "nothing", "once", "only", "over", "private", "random", "round", "rounds",
    "samples", "similar", "some", "that", "their", "then", "trained", "tuned", "under",
    "unmasked", "users", "vectors",
}  # fmt: skip


def test_the_glossary_has_the_terms_of_the_tables_of_methods(pages: dict[str, str]) -> None:
    texts = [f"{fact.finds} {fact.reads}" for fact in PROTOCOLS.values()]
    for row in re.findall(r"^\| `[\w-]+` \|.*$", pages["docs/protocols.md"], re.M):
        texts.append(" ".join(row.split("|")[4:6]))
    assert len(texts) == 2 * len(PROTOCOLS)
    used = set(re.findall(r"[a-z-]{4,}", " ".join(texts).lower())) - PLAIN
    terms = " ".join(re.findall(r"^\*\*(.+?)\.\*\* ", pages["docs/glossary.md"], re.M)).lower()
    # "losses" and "loss" are one term
    assert {word for word in used if word[:5].rstrip("se") not in terms} == set()
    assert {"linkage", "subspaces", "moments"} <= used
    for heading in ("k", "ε, δ"):
        assert f"**{heading}.**" in pages["docs/glossary.md"]


def test_the_glossary_has_some_forty_terms_each_once(pages: dict[str, str]) -> None:
    terms = re.findall(r"^\*\*(.+?)\.\*\* ", pages["docs/glossary.md"], re.M)
    assert 25 <= len(terms) <= 50
    assert len(terms) == len(set(terms))


def test_a_methods_page_says_what_its_runs_can_have(pages: dict[str, str]) -> None:
    cfl = pages[SITE.METHOD.format("cfl")]
    assert "| aggregation | `plain` | `plain`, `secagg` |" in cfl
    assert "| relevance |" not in cfl  # CFL compares no pairs of clients
    assert "| relevance | `plain`, `pads`, `ckks` |" in pages[SITE.METHOD.format("oneshot")]
    nearby = pages[SITE.METHOD.format("mrmtl")]
    assert "`distributed` with aggregation secagg" in nearby
    assert "| never masked |" in cfl and "| never masked |" not in nearby  # no field is
