"""Files of audits: a page and a table for each adversary and budget, which no other audit replaces.

Each file is written in one step, so audits that run at once leave whole files.

They are for the owner of the run; a bundle has what may be handed over.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from securecluster.app import audit_overview, audit_page, bundle, html_page, outputs, report_page
from securecluster.app.audit import BUDGET, FAILED, RUN, SCHEMA, TWIN, Adversary
from securecluster.app.finished_run import FinishedRun
from securecluster.core import atomic_files
from securecluster.errors import RunFolderError, UsageError
from securecluster.runs import run_folder

RESULT = ".json"
PAGE = ".html"
IS_RESULT = outputs.json_with(("schema", "adversary", "attacks"))
OLDER = "audit.json"  # of every adversary, before each had files of its own
PLAIN = re.compile(r"[a-z0-9]+")
LONGEST = 60  # letters of an adversary in a file name
DIGITS = 16  # of digests in hexadecimal


def stem(
    adversary: Adversary, names: Sequence[str], budget: float, attacks: Sequence[str] = ()
) -> str:
    """Return the name of an audit's files, without their endings.

    It has letters, digits and hyphens alone, whatever clients are called. A name that has others,
    or is long, appears as a digest. Equal adversaries and budgets have equal names.

    Args:
        adversary: that attacked.
        names: of the clients, in the order of their numbers.
        budget: seconds.
        attacks: that were chosen; none where all are run.
    """
    words = {str(party) for party in adversary.parties if isinstance(party, str)}
    words |= {f"client-{_plain(names[number])}" for number in adversary.clients}
    text = "-".join(sorted(words, key=lambda word: (word.startswith("client-"), word)))
    if len(text) > LONGEST:
        text = _digest(text)
    if budget != BUDGET:
        text += "-" + f"{budget:g}s".replace(".", "-").replace("+", "")
    if attacks:
        text += f"-of-{_digest(' '.join(sorted(attacks)))}"
    return f"audit-{text}"


def _plain(name: str) -> str:
    """Return a client's name, or its digest where it is not of small letters and digits."""
    return name if PLAIN.fullmatch(name) else "x" + _digest(name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def identity(run: FinishedRun) -> str:
    """Return a digest by which two runs are told apart, of what a bundle shows of them anyway.

    Args:
        run: the run.
    """
    shown = [bundle.public(run.config), bundle.public(run.result)]
    return _digest(json.dumps(shown, sort_keys=True))


def check_free(folder: Path, name: str, run: FinishedRun) -> bool:
    """Return whether an audit replaces an earlier one of the same run, adversary and budget.

    Args:
        folder: that is written to.
        name: of the audit's files, without their endings.
        run: the run.

    Raises:
        UsageError: another run's audit is there.
    """
    path = folder / f"{name}{RESULT}"
    for page in (folder / f"{name}{PAGE}", folder / audit_overview.NAME):
        atomic_files.check_output(page, html_page.is_page)
    if not path.is_file():
        return False
    content = _content(path)
    if content.get("run") != identity(run):
        raise UsageError(f"{path} is the audit of another run: give another --out")
    return True


def has_older(folder: Path) -> bool:
    """Return whether a folder has an audit of a version that kept one audit a folder.

    Args:
        folder: that is written to.
    """
    return (folder / OLDER).is_file()


def write(folder: Path, name: str, result: str, page: str) -> list[Path]:
    """Write the files of an audit, readable by their owner only, and return their paths.

    Args:
        folder: which is made if it does not exist.
        name: of the files, without their endings.
        result: as JSON.
        page: as HTML.
    """
    atomic_files.make_folder(folder)
    paths = []
    for ending, text, is_own in ((RESULT, result, IS_RESULT), (PAGE, page, html_page.is_page)):
        path = folder / f"{name}{ending}"
        # the page shows clients' data, and both have clients' names
        atomic_files.write_output(path, text.encode(), is_own, atomic_files.OWNER)
        paths.append(path)
    return paths


def handed_over(folder: Path, run: FinishedRun, with_uncovered: bool = False) -> dict[str, str]:
    """Return all audits of a run in a folder by file name: scores, and nothing that attacks saw.

    Args:
        folder: that audits were written to.
        run: the run.
        with_uncovered: keep what no ε covers, such as clients' names.

    Raises:
        RunFolderError: an audit that this version cannot read.
    """
    texts = {}
    contents = []
    for path, content in _audits(folder, run):
        name = path.stem
        numbered = content.pop("numbered_name")
        if not with_uncovered:
            name = numbered
            try:
                content = _without_names(content)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise _unreadable(path) from None
        contents.append(content)
        texts[name + RESULT] = json.dumps(content, indent=2) + "\n"
        own = path.with_suffix(PAGE)
        try:
            shown = html_page.handed_over(atomic_files.read(own).decode(), with_uncovered)
        except ValueError:
            raise _unreadable(own) from None
        texts[name + PAGE] = shown
    if len(contents) >= audit_overview.FEWEST:
        page = audit_overview.page(_title(run), contents, audit_page.facts_of(run))
        texts[audit_overview.NAME] = html_page.handed_over(page, with_uncovered)
    return texts


def overview(folder: Path, run: FinishedRun) -> list[Path]:
    """Write the page of all audits of a run in a folder, and return its path.

    Args:
        folder: that audits were written to.
        run: the run.

    Returns:
        No path where there is one audit alone, which needs no such page, or one that this version
        cannot read: a bundle is refused then, and an audit that took minutes is not.
    """
    try:
        contents = [content for _, content in _audits(folder, run)]
    except RunFolderError:
        return []
    if len(contents) < audit_overview.FEWEST:
        return []
    page = audit_overview.page(_title(run), contents, audit_page.facts_of(run))
    path = folder / audit_overview.NAME
    atomic_files.write_output(path, page.encode(), html_page.is_page, atomic_files.OWNER)
    return [path]


def _title(run: FinishedRun) -> str:
    return report_page.title("Audits", run)


def _audits(folder: Path, run: FinishedRun) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the audits of a run in a folder: path and content of the table.

    Raises:
        RunFolderError: an audit that this version cannot read.
    """
    for path in sorted(folder.glob(f"audit-*{RESULT}"), key=_place):
        if run_folder.AUDITS.fullmatch(path.name) is None:
            continue
        content = _content(path)
        if content.pop("run") == identity(run):
            yield path, content


def _place(path: Path) -> tuple[bool, bool, str]:
    """Return where an audit stands among others: the server's first, and those of clients last."""
    kind = path.name.split("-")[1].partition(".")[0]
    return kind != "server", kind == "client", path.name


def _without_names(content: dict[str, Any]) -> dict[str, Any]:
    """Return an audit's table without names of clients, which texts of errors may have, too.

    Args:
        content: of the table.
    """
    attacks = []
    for row in content["attacks"]:
        entries = {column: dict(row[column]) for column in (RUN, TWIN)}
        for entry in entries.values():
            if entry["verdict"].startswith(FAILED):
                entry["verdict"] = "failed"
        attacks.append(row | entries)
    return content | {"adversary": content["numbered"], "attacks": attacks}


def _content(path: Path) -> dict[str, Any]:
    """Return the content of an audit's table.

    Raises:
        RunFolderError: it is damaged, or of another version.
    """
    try:
        content = json.loads(atomic_files.read(path))
    except (ValueError, RecursionError):
        raise _unreadable(path) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise _unreadable(path)
    if not {"run", "numbered", "attacks"} <= content.keys():
        raise _unreadable(path)
    # it becomes the name of a file
    name = content.get("numbered_name")
    if not isinstance(name, str) or run_folder.AUDITS.fullmatch(name + RESULT) is None:
        raise _unreadable(path)
    return content


def _unreadable(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged, or an audit of another version: remove it, and audit again"
    )
