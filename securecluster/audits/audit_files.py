"""Files of audits: a page, a table and their digests for each adversary and budget.

No other audit replaces them. All three are whole before the first one appears, so a disk that is
full, or audits that run at once, leave whole files. The digests lie in a file of their own: a table
or a page that was changed afterwards is noticed, also where it has a digest that fits. Whoever
changes the digests, too, is not: they guard against damage and against a hand in one file.

Files are for the owner of the run; a bundle has what may be handed over. Those that are not what an
audit wrote are named, and are in no overview and no bundle: they end no audit that took minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.audits import audit_overview, audit_page, audit_table
from securecluster.audits.audit_table import AuditTable
from securecluster.audits.findings import FAILED
from securecluster.audits.run_audit import BUDGET, RUN, TWIN, Adversary
from securecluster.core import atomic_files, manifest
from securecluster.errors import RunFolderError, UsageError
from securecluster.folders import run_folder
from securecluster.reports import allow_list, bundle, html_page, report_page
from securecluster.reports.finished_run import FinishedRun

RESULT = ".json"
PAGE = ".html"
DIGESTS = ".manifest"
OLDER = "audit.json"  # of every adversary, before each had files of its own
PLAIN = re.compile(r"[a-z0-9]+")
LONGEST = 60  # letters of an adversary in a file name
DIGITS = 16  # of digests in hexadecimal
TRIES = 5  # the same audit, made at the same time, may move its files in between these
# by these a simulation's data can be made again, or a guess of it be checked
SECRET = frozenset({"seed", "data_digest", "digest"})


@dataclass(frozen=True)
class Kept:
    """An audit of a run, as it was written.

    Args:
        name: of its files, without their endings.
        table: its content.
        page: its text.
    """

    name: str
    table: AuditTable
    page: str


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
    """Return a digest by which two runs are told apart, and nothing of their data is guessed.

    Args:
        run: the run.
    """
    shown = [_without_secrets(run.config), _without_secrets(run.result)]
    return _digest(json.dumps(shown, sort_keys=True))


def _without_secrets(content: Any) -> Any:
    """Return JSON values without seeds and digests, and without folders of the user's files."""
    if isinstance(content, dict):
        entries = {}
        for name, value in content.items():
            if name in SECRET:
                continue
            if name == "data" and isinstance(value, str):
                value = value.rpartition("/")[2]
            entries[name] = _without_secrets(value)
        return entries
    if isinstance(content, list):
        return [_without_secrets(value) for value in content]
    return content


def check_free(folder: Path, name: str, run: FinishedRun) -> bool:
    """Return whether an audit replaces an earlier one of the same run, adversary and budget.

    Args:
        folder: that is written to.
        name: of the audit's files, without their endings.
        run: the run.

    Raises:
        UsageError: another run's audit, or something that is no file, is there.
        RunFolderError: what is there is no audit that this version reads.
    """
    check_places(folder, name)
    path = folder / f"{name}{RESULT}"
    if not path.is_file():  # nor what a link leads to
        return False
    if audit_table.read(path, atomic_files.read(path))["run"] != identity(run):
        raise UsageError(f"{path} is the audit of another run: give another --out")
    return True


def check_places(folder: Path, name: str) -> None:
    """Raise an error where something lies that a file of an audit cannot, or may not, replace.

    Args:
        folder: that is written to.
        name: of the audit's files, without their endings.
    """
    for file in (*_files(name), audit_overview.NAME):
        _check_place(folder / file)
    for page in (folder / f"{name}{PAGE}", folder / audit_overview.NAME):
        atomic_files.check_output(page, html_page.is_page)


def _check_place(path: Path) -> None:
    """Raise UsageError where something lies that a file cannot replace.

    Args:
        path: of a file to be written.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}): give another --out, or check its permissions"
        ) from None
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path} is no file, and in the place of one: move it, or give another --out"
        )


def _files(name: str) -> tuple[str, str, str]:
    """Return the names of an audit's files.

    Args:
        name: without their endings.
    """
    return f"{name}{RESULT}", f"{name}{PAGE}", f"{name}{DIGESTS}"


def has_older(folder: Path) -> bool:
    """Return whether a folder has an audit of a version that kept one audit a folder.

    Args:
        folder: that is written to.
    """
    return (folder / OLDER).is_file()


def write(folder: Path, name: str, table: Mapping[str, Any], page: str) -> list[Path]:
    """Write the files of an audit, readable by their owner only.

    Args:
        folder: which is made if it does not exist.
        name: of the files, without their endings.
        table: as JSON values.
        page: as HTML.

    Returns:
        The paths of the table and of the page.
    """
    result, shown, digests = _files(name)
    text = json.dumps(table, indent=2) + "\n"
    contents = {result: text.encode(), shown: page.encode()}
    marks = {file: manifest.Mark.of(data) for file, data in contents.items()}
    contents[digests] = manifest.encode(marks)
    atomic_files.make_folder(folder)
    # the page shows clients' data, and both have clients' names
    for _ in range(TRIES):
        with atomic_files.staged(folder, contents, atomic_files.OWNER) as move_in:
            move_in()
        if _belong_together(folder, digests):
            break
    return [folder / result, folder / shown]


def _belong_together(folder: Path, digests: str) -> bool:
    """Return whether an audit's files have their digests.

    Args:
        folder: of the files.
        digests: name of the file of digests.
    """
    try:
        manifest.check(folder, manifest.read(folder, digests))
    except RunFolderError:
        return False
    return True


def kept(folder: Path, run: FinishedRun) -> tuple[list[Kept], list[str]]:
    """Return the audits of a run in a folder, and a sentence on each one that is none.

    Args:
        folder: that audits were written to.
        run: the run.

    Returns:
        Those whose table and page are what an audit wrote, the server's first; and the sentences.
    """
    audits = []
    refused = []
    for path in sorted(folder.glob(f"audit-*{RESULT}"), key=_place):
        if run_folder.AUDITS.fullmatch(path.name) is None:
            continue
        try:
            audit = _read(folder, path.stem)
        except RunFolderError as error:
            refused.append(str(error))
            continue
        if audit.table["run"] == identity(run):
            audits.append(audit)
    return audits, refused


def _read(folder: Path, name: str) -> Kept:
    """Return an audit by its files.

    Raises:
        RunFolderError: a file is missing, or is not what the audit wrote.
    """
    result, shown, digests = _files(name)
    try:
        marks = manifest.read(folder, digests)
        table = audit_table.read(folder / result, manifest.checked(folder, result, marks))
        page = manifest.checked(folder, shown, marks).decode()
        html_page.handed_over(page)  # it is whole
    except (RunFolderError, ValueError):
        raise RunFolderError(
            f"{folder / result} or its page is not what an audit of this version wrote there: both "
            "stay, and are in no overview and in no bundle; make this audit again, or remove them"
        ) from None
    return Kept(name, table, page)


def handed_over(
    audits: Sequence[Kept], run: FinishedRun, with_uncovered: bool = False
) -> dict[str, str]:
    """Return audits of a run by file name: scores, and nothing that attacks saw.

    Args:
        audits: as `kept` returned them.
        run: the run.
        with_uncovered: keep what no ε covers, such as clients' names.
    """
    texts = {}
    contents = []
    for audit in audits:
        content = _leaving(audit.table, run, with_uncovered)
        contents.append(content)
        name = audit.name if with_uncovered else audit.table["numbered_name"]
        texts[name + RESULT] = json.dumps(content, indent=2) + "\n"
        texts[name + PAGE] = html_page.handed_over(audit.page, with_uncovered)
    if len(contents) >= audit_overview.FEWEST:
        page = audit_overview.page(_title(run), contents, audit_page.facts_of(run))
        texts[audit_overview.NAME] = html_page.handed_over(page, with_uncovered)
    return texts


def _leaving(table: AuditTable, run: FinishedRun, with_uncovered: bool) -> Any:
    """Return what may leave of an audit's table.

    Args:
        table: its content.
        run: the run.
        with_uncovered: keep what no ε covers.
    """
    content = allow_list.leaving(table, allow_list.AUDIT, bundle.leaving(run, with_uncovered))
    if with_uncovered:
        return content
    for row in content["attacks"]:
        outcomes = [row[RUN], row[TWIN], *row[RUN]["without"]]
        # texts of errors may have names of clients
        for outcome in outcomes:
            for name in ("verdict", "why"):
                if FAILED in outcome.get(name, ""):
                    outcome[name] = "failed"
    return content | {"adversary": table["numbered"]}


def overview(folder: Path, audits: Sequence[Kept], run: FinishedRun) -> list[Path]:
    """Write the page of all audits of a run in a folder, and return its path.

    Args:
        folder: that audits were written to.
        audits: as `kept` returned them.
        run: the run.

    Returns:
        No path where there is one audit alone, which needs no such page.
    """
    if len(audits) < audit_overview.FEWEST:
        return []
    tables = [audit.table for audit in audits]
    page = audit_overview.page(_title(run), tables, audit_page.facts_of(run))
    path = folder / audit_overview.NAME
    atomic_files.write_output(path, page.encode(), html_page.is_page, atomic_files.OWNER)
    return [path]


def _title(run: FinishedRun) -> str:
    return report_page.title("Audits", run)


def _place(path: Path) -> tuple[bool, bool, str]:
    """Return where an audit stands among others: the server's first, and those of clients last."""
    role = path.name.split("-")[1].partition(".")[0]
    return role != "server", role == "client", path.name
