"""The page of a finished run: who saw what, what ε covers, and how to repeat it, in one file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from securecluster.core import atomic_files
from securecluster.core.number_format import number, printable, shown
from securecluster.data.feature_columns import listed
from securecluster.folders.schemas import Privacy, scores_of
from securecluster.parties.derived import call_types
from securecluster.privacy import run_secret
from securecluster.reports import html_page as html
from securecluster.reports import privacy_report, score_table
from securecluster.reports.finished_run import (
    FinishedRun,
    command_of,
    epsilon_by_client,
    epsilon_by_round,
    epsilon_of_field,
)
from securecluster.reports.privacy_report import Statements
from securecluster.reports.report import bytes_table, early_end, megabytes
from securecluster.statements import odds
from securecluster.statements.disclosures import READERS, Disclosure, protections

PAGE = "report.html"
OF_NOBODY = "0: it depends on nobody's data"
MADE_OF_EARLIER = "none of its own: it is made of earlier messages, and tells what they tell"
MOST_NAMES = 12  # classes, features, or clients of one ε
MOST_CLIENTS = 40  # rows of a table by client
SERVER_IS = (
    "The server follows the protocol, and tries to learn from everything that it receives. It sees "
    "the messages of the table below, and nothing else: replaying the run shows this."
)
CLIENTS_ARE = (
    "Clients follow the protocol, too. Each one reads the averages of its own cluster; in a "
    "cluster of two it can compute the other's update from them."
)
WIRE_IS = (
    "Someone who only listens to the network sees who takes part, when, and how long each message "
    "is. The content of messages is taken to be encrypted on the way."
)
SIMULATED = "This run was a simulation on one machine."
OWN_SECRET = (
    f"Its keys, masks and noise follow from a secret of its own, {run_secret.FILE} in the run "
    "folder: keep that file to yourself. It is no part of this page."
)
FROM_SEED = f"{run_secret.FROM_SEED[:1].upper()}{run_secret.FROM_SEED[1:]}."


def page(run: FinishedRun) -> str:
    """Return the page without attacks.

    Args:
        run: the run.
    """
    return html.document(title("Report", run), sections(run))


def title(page_name: str, run: FinishedRun) -> str:
    """Return the heading of a page.

    Args:
        page_name: its name.
        run: the run.
    """
    result = run.result
    data = printable(result["data"].rpartition("/")[2])
    return f"{page_name}: {result['protocol']} on {data}, {result['clients']} clients"


def sections(run: FinishedRun) -> Iterator[str]:
    """Yield the sections of the report.

    Args:
        run: the run.
    """
    yield summary(run)
    yield scores(run)
    yield threat_model(run)
    yield who_saw_what(run)
    yield guarantee(run)
    yield messages(run)
    yield pictures(run)
    yield reproduction(run)


def summary(run: FinishedRun) -> str:
    """Return what the run was, in a table."""
    result = run.result
    metric = result["metric"]
    score = scores_of(result)["after"]
    observed = [
        ("clusters found", str(result["clusters"])),
        (f"{metric} on clients' test samples", shown(score, metric, result["unit"])),
        ("agreement with the true clusters (ARI)", number(result["metrics"]["ari"])),
    ]
    if "stopped" in result:
        observed.append(("stopped", printable(early_end(result["stopped"]))))
    rows = [
        ("protocol", result["protocol"]),
        ("data", f"{printable(result['data'].rpartition('/')[2])} ({result['scenario']})"),
        ("clients", str(result["clients"])),
        *_names(run),
        ("ε", epsilon_text(result["privacy"])),
        ("bytes sent by clients", megabytes(result["bytes"]["up"])),
        ("bytes sent to clients", megabytes(result["bytes"]["down"])),
        ("version", result["version"]),
    ]
    return html.section(
        "The run",
        html.uncovered(html.table(("", ""), observed)),
        html.shown(html.table(("", ""), rows)),
    )


def scores(run: FinishedRun) -> str:
    """Return the scores by client and by cluster; no text where nobody measured any."""
    headings, rows = score_table.table_of(run, MOST_CLIENTS)
    if not rows:
        return ""
    blocks = [html.table(headings, rows), html.paragraph(score_table.NOTE, "note")]
    return html.section("Scores on clients' test samples", html.uncovered(*blocks))


def _names(run: FinishedRun) -> Iterator[tuple[str, str]]:
    """Yield the names of classes and features, where the data came with some."""
    names: dict[str, Sequence[Any]] = {
        score_table.outputs_of(run.result["metric"]): run.result.get("class_names", []),
        "features": run.result.get("feature_names", []),
    }
    for heading, values in names.items():
        if values:
            texts = [printable(str(value)) for value in values]
            yield heading, listed(texts, MOST_NAMES)


def epsilon_text(privacy: Privacy) -> str:
    """Return ε in a few words.

    Args:
        privacy: `privacy` of result.json.
    """
    epsilon = privacy["epsilon"]
    if epsilon is None:
        return "infinite: differential privacy guarantees nothing for this run"
    if not privacy.get("delta"):
        return "0: nothing that depends on data was released"
    return f"{epsilon:.4g} at δ = {privacy['delta']:g} ({privacy['neighbouring']})"


def threat_model(run: FinishedRun) -> str:
    """Return who is trusted with what, in plain words."""
    privacy = run.result["privacy"]
    keys = FROM_SEED if privacy["reproducible_keys"] else OWN_SECRET
    simulated = f"{SIMULATED} {keys}"
    sentences = [SERVER_IS, CLIENTS_ARE, WIRE_IS, *protections(privacy), simulated]
    paragraphs = [html.paragraph(sentence) for sentence in sentences]
    return html.section("Who is trusted with what", html.shown(*paragraphs))


def who_saw_what(run: FinishedRun) -> str:
    """Return the table party × message × form × ε, and what each message reveals."""
    privacy = run.result["privacy"]
    rows = list(_field_rows(run))
    rows += list(_query_rows(run))
    rows.append(("the network", "every message", "its length and time, not its content", "–"))
    table = html.table(("who", "message", "form", "ε of it alone"), rows)
    statements = _statements(privacy_report.views(privacy))
    return html.section("Who saw what", html.shown(table, *statements))


def _statements(groups: Sequence[Statements]) -> list[str]:
    """Return the sentences of a report that pages have, each group under its heading."""
    return html.headed((group.heading, group.texts) for group in groups if group.heading)


def _field_rows(run: FinishedRun) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each field of clients' replies that its reader received."""
    privacy = run.result["privacy"]
    kinds = ", ".join(mask["kind"] for mask in privacy["masks"])
    delta = privacy["delta"] or run.config["network"]["delta"]
    for entry in privacy["fields"]:
        field = Disclosure.read(entry)
        epsilon = epsilon_of_field(run.ledger, field.method, field.field, delta)
        reader = READERS.get(field.reader, field.reader)
        alone = MADE_OF_EARLIER if field.derived else _epsilon(epsilon)
        if not field.derived and epsilon == 0:
            alone = OF_NOBODY
        yield (reader, f"{field.name} ({field.verb})", field.form(kinds), alone)


def _query_rows(run: FinishedRun) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each message to a client that has fields."""
    for method in run.result["bytes"]["by_message"]:
        fields = _field_names(run, method)[0]
        if fields:
            message = f"{', '.join(fields)} for {method}"
            yield ("a client", message, "the request to this client", "–")


def _field_names(run: FinishedRun, method: str) -> tuple[list[str], list[str]]:
    """Return the fields of a method's requests and replies; none where they are not known."""
    try:
        query, reply = call_types(run.protocol, method)
    except (AttributeError, KeyError):
        return [], []
    names = []
    for message in (query, reply):
        names.append([field.name for field in dataclasses.fields(message)])
    return names[0], names[1]


def _epsilon(value: float) -> str:
    """Return ε as text."""
    if math.isinf(value):
        return "∞"
    return f"{value:.4g}"


def guarantee(run: FinishedRun) -> str:
    """Return ε with its assumptions, for each client and over the rounds."""
    privacy = run.result["privacy"]
    paragraphs = [*odds.in_words(privacy), f"ε is {epsilon_text(privacy)}."]
    blocks = [html.shown(*map(html.paragraph, paragraphs))]
    if privacy["epsilon"] is not None and privacy["delta"]:
        blocks += _over_rounds(run, privacy["delta"])
    if privacy["exact"]:
        exact = ", ".join(privacy["exact"])
        blocks.append(html.shown(html.paragraph(f"Released without noise: {exact}.")))
    statements = _statements(privacy_report.guarantee(privacy))
    return html.section("What ε guarantees", *blocks, html.shown(*statements))


def _over_rounds(run: FinishedRun, delta: float) -> list[str]:
    """Return the chart of ε over rounds, and the table of ε by client."""
    by_client = epsilon_by_client(run.ledger, delta)
    equal: dict[str, list[str]] = {}
    for name, spent in by_client.items():
        equal.setdefault(_epsilon(spent), []).append(printable(name))
    rows = [(listed(names, MOST_NAMES), epsilon) for epsilon, names in equal.items()]
    if len(rows) > MOST_CLIENTS:
        rows = [*rows[:MOST_CLIENTS], (f"… {len(rows) - MOST_CLIENTS} more", "")]
    table = html.table(("clients", "ε of each"), rows)
    points = epsilon_by_round(run.ledger, delta)
    finite = [(float(last), epsilon) for last, epsilon in points if math.isfinite(epsilon)]
    blocks = [html.uncovered(html.subsection("By client", table))]
    if len(finite) > 1:
        chart = html.steps(f"ε of everything released up to a round, at δ = {delta:g}", finite)
        blocks.insert(0, html.shown(chart))
    return blocks


def messages(run: FinishedRun) -> str:
    """Return the bytes of each message, with its fields."""
    sent = run.result["bytes"]
    (first, *directions), rows = bytes_table(sent)
    lines = []
    for name, *counts in rows:
        # the last row is of all messages
        query, reply = _field_names(run, name) if name in sent["by_message"] else ([], [])
        lines.append((name, ", ".join(query), ", ".join(reply), *counts))
    headings = (first, "fields to a client", "fields from a client", *directions)
    note = "Bytes on the wire: up is from clients to the server, down from the server to clients."
    table = html.table(headings, lines)
    return html.section("Messages and bytes", html.shown(table, html.paragraph(note)))


def pictures(run: FinishedRun) -> str:
    """Return the pictures of the run, embedded."""
    figures = []
    for path in run.pictures:
        name = path.stem.replace("-", " ").replace("_", " ")
        figures.append(html.picture(atomic_files.read(path), f"{name}, over the run"))
    note = ""
    if figures:
        note = html.paragraph(
            "Pictures may show what only an observer knows, such as true clusters.", "note"
        )
    return html.section("Pictures of the run", html.uncovered(note, *figures))


def reproduction(run: FinishedRun, *further: str) -> str:
    """Return how to repeat the run, and commands on its folder.

    Args:
        run: the run.
        further: commands besides, such as that of the audit.
    """
    command = command_of(run)
    folder = run.folder.name or "DIR"
    lines = [f"securecluster replay {folder}", f"securecluster report {folder} --html", *further]
    if command is None:
        text = (
            "Data, options or a callback that stopped it came from Python: repeat it there, with "
            "fit(federation, folder=...)."
        )
        blocks = [html.paragraph(text)]
    else:
        lines.insert(0, command)
        note = (
            "SEED is in config.json. A new run draws new keys and noise; replay repeats the server "
            f"of this one, and takes {run_secret.FILE}."
        )
        if run.result["privacy"]["reproducible_keys"]:
            note = "SEED is in config.json; the run's keys and noise follow from it."
        blocks = [html.paragraph(note)]
    return html.section("How to repeat it", html.shown(*blocks, html.code("\n".join(lines))))
