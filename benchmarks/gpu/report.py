"""The results, as files that are whole at any moment."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files

CHECKS = ("check", "result", "error", "bound", "why", "message")
TIMINGS = (
    "network",
    "parameters",
    "clients",
    "way",
    "clients_timed",
    "rounds",
    "median_seconds",
    "min_seconds",
    "max_seconds",
    "times_batched",
    "device_peak_gib",
    "ram_peak_gib",
)
SKIPPED = ("piece", "kind", "reason")
ENDS_PIECE = ("check", "timing", "skipped")  # events that come after a piece was done or left out


class Results:
    """Results of checks and timings.

    Args:
        folder: where the files go.
        say: prints one line of progress.
    """

    log_name = "worker.log"  # what workers write to standard error

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self._say = say
        self.done: set[str] = set()
        self.checks: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._machine: dict[str, str] = {}
        self._pieces: dict[str, str] = {}

    @property
    def failed(self) -> list[str]:
        """Return the names of the checks that failed."""
        return [row["check"] for row in self.checks if row["result"] != "passed"]

    def take(self, event: dict[str, Any]) -> None:
        """Keep one event of a worker, and write the files again."""
        kind = event["event"]
        if kind in ("begin", "end"):
            return
        if kind == "machine":
            self._take_machine(event)
        elif kind == "check":
            self._take_checks(event["rows"])
        elif kind == "timing":
            self._take_timings(event["rows"])
        elif kind == "skipped":
            self._skip(event["piece"], event["kind"], event["reason"])
        if kind in ENDS_PIECE:
            self.done.add(event["piece"])
        self.write()

    def _take_machine(self, event: dict[str, Any]) -> None:
        self._machine = event["machine"]
        self._pieces = dict(event["pieces"])
        for note in event["notes"]:
            self.note(note)

    def _take_checks(self, rows: Sequence[dict[str, Any]]) -> None:
        self.checks += rows
        for row in rows:
            detail = row["message"] or f"error {row['error']}, bound {row['bound']}"
            self._say(f"{row['result']}: {row['check']} ({detail})")

    def _take_timings(self, rows: Sequence[dict[str, Any]]) -> None:
        self.timings += rows
        for row in rows:
            name = f"{row['network']}, {row['clients']} clients, {row['way']}"
            self._say(f"timed: {name}: {row['median_seconds']} s a round")

    def lost(self, name: str, kind: str, reason: str) -> None:
        """Note a piece whose worker did not come back from it.

        A check counts as failed, and a timing as skipped.
        """
        if kind == "check":
            row = {"check": name, "result": "failed", "message": reason}
            self.take({"event": "check", "piece": name, "rows": [dict.fromkeys(CHECKS, "") | row]})
        else:
            self.take({"event": "skipped", "piece": name, "kind": kind, "reason": reason})

    def out_of_time(self) -> None:
        """Note what no worker came to."""
        for name, kind in self._pieces.items():
            if name not in self.done:
                self.done.add(name)
                self._skip(name, kind, "the time was over")
        self.write()

    def keep_log(self, source: Path) -> None:
        """Add what a worker wrote to standard error to the log, if it wrote anything."""
        text = source.read_bytes() if source.exists() else b""
        if text and self.folder.is_dir():
            with (self.folder / self.log_name).open("ab") as log:
                log.write(text)

    def note(self, text: str) -> None:
        """Put a sentence into the summary, once."""
        if text not in self.notes:
            self.notes.append(text)
            self._say(text)
            self.write()

    def _skip(self, piece: str, kind: str, reason: str) -> None:
        self.skipped.append({"piece": piece, "kind": kind, "reason": reason})
        self._say(f"skipped: {piece} ({reason})")

    def write(self) -> None:
        """Write all files, each by one rename."""
        atomic_files.make_folder(self.folder)
        for name, columns, rows in (
            ("checks.csv", CHECKS, self.checks),
            ("timings.csv", TIMINGS, self.timings),
            ("skipped.csv", SKIPPED, self.skipped),
        ):
            atomic_files.write_atomic(self.folder / name, _csv(columns, rows).encode())
        atomic_files.write_atomic(self.folder / "summary.md", self.summary().encode())

    def summary(self) -> str:
        """Return the text of summary.md."""
        passed = len(self.checks) - len(self.failed)
        lines = ["# Device checks and timings", ""]
        lines += [f"- {name}: {value}" for name, value in self._machine.items()]
        lines += [f"- {note}" for note in self.notes]
        lines += [
            "",
            f"{passed} checks passed, {len(self.failed)} failed, {len(self.skipped)} pieces were "
            "skipped.",
            "",
        ]
        bad = [row for row in self.checks if row["result"] != "passed"]
        if bad:
            lines += ["## Failed", "", *_table(("check", "error", "bound", "message"), bad), ""]
        if self.timings:
            lines += ["## Seconds a round", "", TIMED, "", *_table(TIMINGS, self.timings), ""]
        if self.skipped:
            lines += ["## Skipped", "", *_table(SKIPPED, self.skipped), ""]
        if self.checks:
            lines += ["## Checks", "", *_table(CHECKS[:5], self.checks), ""]
        return "\n".join(lines)


TIMED = (
    "A round is one epoch of every client in mini-batches of 10 samples. All ways of a network "
    "take turns; the first turn of each is not counted. A plain loop on fewer clients than there "
    "are (`clients_timed`) is scaled up to all of them. The centralised model takes one epoch "
    "over all clients' samples, in mini-batches of up to 1,000. `times_batched` is the median "
    "over that of `batched`. On a GPU all ways compute float32 without TF32, by deterministic "
    "kernels. `ram_peak_gib` is the most that the process has held so far."
)


def _csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [_table_row(columns), _table_row(["---"] * len(columns))]
    for row in rows:
        cells = [str(row[column]).replace("|", "\\|") for column in columns]
        lines.append(_table_row(cells))
    return lines


def _table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
