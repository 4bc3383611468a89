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
from typing import Any, is_typeddict

import pytest

import securecluster
from securecluster.audits import audit_files, audit_overview
from securecluster.cli import node_command
from securecluster.data.simulation import Simulation, option_name
from securecluster.folders import run_folder
from securecluster.folders import schemas as contents
from securecluster.folders.schemas import Privacy, Result, RoundLine
from securecluster.messaging.transcript import INDEX
from securecluster.nodes import authority_node, party
from securecluster.nodes.node import ledger_of
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
BESIDE = "evidence/"
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
    """The text of every page, by place."""
    made: dict[str, str] = SITE.site()
    return made


def places_in_tree() -> set[str]:
    """Return the places of the tree, with those that .ci/site.py puts there."""
    named = {place for place in TREE if place.endswith(".md")}
    made = {SITE.METHODS_INDEX, *(own.place for own in SITE.sections()), *SITE.tutorials()}
    assert {"tutorials/", "methods/"} <= set(TREE)
    return named | made


def links(text: str) -> list[str]:
    """Return what the links of a page lead to, without those to other hosts."""
    outside = SITE.FENCED.sub("", text)
    inline = [target for _, _, target, _ in SITE.LINK.findall(outside)]
    return [*inline, *(target for _, target, _ in SITE.REFERENCE.findall(outside))]


def test_every_page_is_in_the_tree_or_beside_it_by_intention(pages: dict[str, str]) -> None:
    left_out = {place for place in set(pages) - places_in_tree() if not place.startswith(BESIDE)}
    assert left_out == set()
    assert places_in_tree() - set(pages) == set()


def test_every_document_is_a_page(pages: dict[str, str]) -> None:
    documents = {path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")}
    documents |= set(ROOT.glob("*.md"))
    assert {path.relative_to(ROOT).as_posix() for path in documents} == set(SITE.places())
    assert set(SITE.places().values()) <= set(pages)


def test_the_index_of_evidence_links_each_page_of_it(pages: dict[str, str]) -> None:
    linked = {posixpath.join(BESIDE, target) for target in links(pages["evidence/README.md"])}
    assert {place for place in pages if place.startswith(BESIDE)} <= linked | {"evidence/README.md"}


def test_every_link_leads_to_a_page_or_a_file_of_the_site(pages: dict[str, str]) -> None:
    there = {*pages, *SITE.linked_files()}
    dead = []
    for place, text in pages.items():
        for target in links(text):
            aim = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            if target and aim not in there:
                dead.append((place, target))
    assert dead == []


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_has_a_page_of_one_shape_with_its_options(
    name: str, pages: dict[str, str]
) -> None:
    page = pages[f"methods/{name}.md"]
    headings = re.findall(r"^## (.+)$", page, re.M)
    assert [heading for heading in headings if heading in SHAPE] == SHAPE
    described = page + pages["reference/command-line.md"]
    for option in fields(protocol_class(name)):
        assert f"| `{option_name(option.name)}`" in described, option.name


def test_a_methods_page_links_the_evidence_that_names_it(pages: dict[str, str]) -> None:
    evidence = {name: pages[f"methods/{name}.md"].split("\n## Evidence\n")[1] for name in PROTOCOLS}
    assert "(../evidence/srfca.md)" in evidence["srfca"]
    assert "(../evidence/srfca.md)" not in evidence["nsim"]
    assert "(../evidence/malicious_clients.md)" in evidence["srfca"]  # its section links it
    assert "(../evidence/hidden.md)" in evidence["hidden"]


def test_options_of_every_run_are_on_the_page_of_the_command_line(pages: dict[str, str]) -> None:
    page = pages["reference/command-line.md"]
    for kind in (Simulation, Settings):
        for option in fields(kind):
            assert f"| `{option_name(option.name)}`" in page, option.name


def test_every_public_name_is_on_the_page_of_python(pages: dict[str, str]) -> None:
    shown = re.findall(r"^::: securecluster\.(?:\w+\.)*(\w+)$", pages["reference/python.md"], re.M)
    assert sorted({*shown, "__version__"} - {"FittedRun"}) == sorted(securecluster.__all__)
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("kind", [Result, Privacy])
def test_every_entry_of_a_result_is_on_its_page(kind: Any, pages: dict[str, str]) -> None:
    section = pages["reference/result.md"].split(f"\n## {kind.__name__}\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.M) == list(kind.__annotations__)
    optional = re.findall(r"^\| `(\w+)` .*may be absent \|$", section, re.M)
    assert {"warning", "power"} <= set(optional) or {"unseen", "free"} <= set(optional)
    assert not {"labels", "epsilon"} & set(optional)
    silent = re.findall(r"^\| `(\w+)` \|[^|]*\|(?: may be absent)? *\|$", section, re.M)
    assert silent == []


def test_every_entry_of_the_other_files_is_described(pages: dict[str, str]) -> None:
    page = pages["reference/result.md"]
    kinds = [kind for kind in vars(contents).values() if is_typeddict(kind)]
    shown = [kind for kind in kinds if kind.__name__ != "_Threshold"]
    assert [f"\n## {kind.__name__}\n" in page for kind in shown] == [True] * len(shown)
    line = page.split("\n## RoundLine\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", line, re.M)) == set(RoundLine.__annotations__) | {
        "lambda"
    }
    silent = re.findall(r"^\| `(\w+)` \|[^|]*\|(?: may be absent)? *\|$", page, re.M)
    assert silent == []


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
    ("text", "path", "place", "moved"),
    [
        ("[a](docs/runs.md#x)", "README.md", "index.md", "[a](runs.md#x)"),
        ("[a](docs/protocols.md#fedavg)", "README.md", "index.md", "[a](methods/fedavg.md)"),
        ("[a](protocols.md#sr-fca)", "docs/data.md", "data.md", "[a](methods/srfca.md)"),
        (
            "[a](#gradient-signatures-in-other-protocols)", "docs/protocols.md", "methods/cfl.md",
            "[a](signature.md#gradient-signatures-in-other-protocols)",
        ),
        ("[a](audit.ipynb)", "docs/audit.md", "audit.md", "[a](tutorials/audit.md)"),
        ("[a](../runs.md)", "docs/evidence/cfl.md", "evidence/cfl.md", "[a](../runs.md)"),
        ("[a](../benchmarks)", "docs/data.md", "data.md", "a"),
        ("[a](https://example.org/b.md)", "README.md", "index.md", "[a](https://example.org/b.md)"),
        ("```\n[a](docs/runs.md)\n```", "README.md", "index.md", "```\n[a](docs/runs.md)\n```"),
        (
            "[f]: ../../benchmarks/results/noise.png", "docs/evidence/noise.md",
            "evidence/noise.md", "[f]: ../benchmarks/results/noise.png",
        ),
    ],
)  # fmt: skip
def test_links_hold_at_a_pages_place_on_the_site(
    text: str, path: str, place: str, moved: str
) -> None:
    assert SITE.moved(text, path, place) == moved


def test_a_notebook_is_shown_with_its_outputs(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# T\\n", "text"]},'
        ' {"cell_type": "code", "source": ["1 + 1"], "outputs": ['
        '{"output_type": "stream", "text": ["so\\n"]},'
        ' {"output_type": "execute_result", "data": {"text/plain": ["2"]}},'
        ' {"output_type": "display_data", "data": {"image/png": "QUI=\\n", "text/plain": "f"}}]}]}'
    )
    assert SITE.notebook(path) == (
        "# T\ntext\n\n```python\n1 + 1\n```\n\n```text\nso\n```\n\n```text\n2\n```\n\n"
        "![output of the cell above](data:image/png;base64,QUI=)\n"
    )


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
    for row in re.findall(r"^\| `[\w-]+` \|.*$", pages["index.md"], re.M):
        texts.append(" ".join(row.split("|")[4:6]))
    assert len(texts) == 2 * len(PROTOCOLS)
    used = set(re.findall(r"[a-z-]{4,}", " ".join(texts).lower())) - PLAIN
    terms = " ".join(re.findall(r"^\*\*(.+?)\.\*\* ", pages["glossary.md"], re.M)).lower()
    # "losses" and "loss" are one term
    assert {word for word in used if word[:5].rstrip("se") not in terms} == set()
    assert {"linkage", "subspaces", "moments"} <= used
    for heading in ("k", "ε, δ"):
        assert f"**{heading}.**" in pages["glossary.md"]


def test_the_glossary_has_some_forty_terms_each_once(pages: dict[str, str]) -> None:
    terms = re.findall(r"^\*\*(.+?)\.\*\* ", pages["glossary.md"], re.M)
    assert 25 <= len(terms) <= 50
    assert len(terms) == len(set(terms))


def test_a_methods_page_says_what_its_runs_can_have(pages: dict[str, str]) -> None:
    cfl = pages["methods/cfl.md"]
    assert "| aggregation | `plain` | `plain`, `secagg` |" in cfl
    assert "| relevance |" not in cfl  # CFL compares no pairs of clients
    assert "| relevance | `plain`, `pads`, `ckks` |" in pages["methods/oneshot.md"]
    nearby = pages["methods/mrmtl.md"]
    assert "`distributed` with aggregation secagg" in nearby
    assert "- Looks for no clusters: models near their mean.\n" in nearby
    assert "the number of clusters" not in nearby
    assert "| never masked |" in cfl and "| never masked |" not in nearby  # no field is
    replies = re.findall(r"^\| `\w+` \| (.+?) \|", cfl.split("### Messages")[1], re.M)
    assert all(not re.match(r"[a-z]+ ", reply) for reply in replies)
