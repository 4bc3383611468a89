"""One page of all audits of a run: what each adversary could learn, side by side.

It is made of the tables that audits left, so it takes no time, and says of each audit when it was
made. A row stands for whatever an attack would learn; those without a score for any adversary are
counted in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from securecluster.attacks.base import Harm
from securecluster.audits import audit_summary
from securecluster.audits.findings import BROKEN, VERDICTS, VISIBLE
from securecluster.audits.run_audit import READING, RUN
from securecluster.reports import html_page as html

NAME = "audit-overview.html"
FEWEST = 2  # audits
KINDS = {BROKEN: "bad", VISIBLE: "seen"}
Content = Mapping[str, Any]


def page(title: str, audits: Sequence[Content], facts: Sequence[tuple[str, str]]) -> str:
    """Return the page.

    Args:
        title: of the page.
        audits: contents of the audits' tables.
        facts: of the run, as rows of a table.
    """
    paragraphs = []
    for audit in audits:
        made = str(audit.get("made", "")).partition("T")[0]
        heading = _name(audit)
        if made:
            heading += f", audited on {made}"
        text = str(audit.get("summary") or " ".join(audit["headline"]))
        paragraphs.append(html.subsection(heading, html.paragraph(text)))
    return html.document(
        title,
        [
            html.section("In short", html.shown(audit_summary.facts_table(facts), *paragraphs)),
            _side_by_side(audits),
        ],
    )


def _name(audit: Content) -> str:
    """Return an adversary and its budget in words, which begin with a capital letter."""
    name = str(audit["adversary"])
    budget = audit["budget"]
    time = "without a limit of time" if budget is None else f"{budget:g} s"
    return f"{name[:1].upper()}{name[1:]} ({time})"


def _side_by_side(audits: Sequence[Content]) -> str:
    """Return the table of attacks by adversaries.

    Args:
        audits: contents of the audits' tables.
    """
    entries: dict[str, dict[int, Content]] = {}
    words = {}
    for position, audit in enumerate(audits):
        for row in audit["attacks"]:
            words[row["attack"]] = row
            if row[RUN]["score"] is not None:
                entries.setdefault(row["attack"], {})[position] = row[RUN]
    rows = []
    for attack in sorted(entries, key=lambda name: _rank(words[name], entries[name].values())):
        learns = str(words[attack].get("learns", attack))
        cells: list[html.Cell] = [learns[:1].upper() + learns[1:], attack]
        for position in range(len(audits)):
            cells.append(_cell(entries[attack].get(position)))
        rows.append(cells)
    omitted = len(words) - len(rows)
    note = f"{omitted} of {len(words)} attacks have no score for any of these adversaries."
    headings = ["what would be learned", "attack", *map(_name, audits)]
    table = html.table(headings, rows)
    return html.section(
        "Side by side", html.shown(table, html.paragraph(note), html.paragraph(READING))
    )


def _rank(row: Content, entries: Any) -> tuple[int, int]:
    """Return where a row stands: by what any adversary has of it, then by its harm.

    Args:
        row: of an audit's table.
        entries: of the run, of the adversaries with a score.
    """
    best = min(VERDICTS.index(entry["verdict"]) for entry in entries)
    harm = str(row.get("harm", Harm.MESSAGES.name)).upper()
    return best, Harm[harm] if harm in Harm.__members__ else Harm.MESSAGES


def _cell(entry: Content | None) -> html.Cell:
    """Return a score with chance and its verdict; a dash without one.

    Args:
        entry: of the run.
    """
    if entry is None:
        return "–"
    score = entry["score"]
    chance = score["chance_interval"]
    text = (
        f"{score['value']:.3g}; chance {chance['low']:.3g} to {chance['high']:.3g}: "
        f"{entry['verdict']}"
    )
    if entry["held"]:
        text += f", {' and '.join(entry['held'])} held"
        return text, "good"
    return text, KINDS.get(entry["verdict"], html.PLAIN)
