"""The results, as files that are complete at any moment."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files

CHECKS = ("check", "result", "error", "bound", "why", "message")
# seconds of one round of all clients; peaks in GiB, that of the device empty on the CPU
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
        """Store one event of a worker, and write the files again.

        Args:
            event: as the worker sent it; "event" says which one it is.
        """
        name = event["event"]
        if name in ("begin", "end"):
            return
        if name == "machine":
            self._take_machine(event)
        elif name == "check":
            self._take_checks(event["rows"])
        elif name == "timing":
            self._take_timings(event["rows"])
        elif name == "skipped":
            self._skip(event["piece"], event["kind"], event["reason"])
        if name in ENDS_PIECE:
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

    def lost(self, name: str, category: str, reason: str) -> None:
        """Note a piece whose worker did not come back from it.

        A check counts as failed, and a timing as skipped.

        Args:
            name: of the piece.
            category: "check" or "timing".
            reason: a sentence for the files.
        """
        event: dict[str, Any] = {"piece": name}
        if category == "check":
            row = dict.fromkeys(CHECKS, "")
            row |= {"check": name, "result": "failed", "message": reason}
            event |= {"event": "check", "rows": [row]}
        else:
            event |= {"event": "skipped", "kind": category, "reason": reason}
        self.take(event)

    def out_of_time(self) -> None:
        """Note what no worker came to."""
        for name, category in self._pieces.items():
            if name not in self.done:
                self.done.add(name)
                self._skip(name, category, "the time was over")
        self.write()

    def keep_log(self, source: Path) -> None:
        """Add what a worker wrote to standard error to the log, if it wrote anything.

        Args:
            source: the file of that worker's standard error.
        """
        if not source.exists():
            return
        text = source.read_bytes()
        if text and self.folder.is_dir():
            with (self.folder / self.log_name).open("ab") as log:
                log.write(text)

    def note(self, text: str) -> None:
        """Put a sentence into the summary, once."""
        if text not in self.notes:
            self.notes.append(text)
            self._say(text)
            self.write()

    def _skip(self, piece: str, category: str, reason: str) -> None:
        self.skipped.append({"piece": piece, "kind": category, "reason": reason})
        self._say(f"skipped: {piece} ({reason})")

    def write(self) -> None:
        """Write all files, each by one rename."""
        atomic_files.make_folder(self.folder)
        texts = {
            "checks.csv": _csv(CHECKS, self.checks),
            "timings.csv": _csv(TIMINGS, self.timings),
            "skipped.csv": _csv(SKIPPED, self.skipped),
            "summary.md": self.summary(),
        }
        for name, text in texts.items():
            self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        atomic_files.write_atomic(self.folder / name, text.encode())

    def summary(self) -> str:
        """Return the text of summary.md."""
        failed = len(self.failed)
        passed = len(self.checks) - failed
        skipped = len(self.skipped)
        counts = f"{passed} checks passed, {failed} failed, {skipped} pieces were skipped."
        lines = ["# Device checks and timings", ""]
        lines += [f"- {name}: {value}" for name, value in self._machine.items()]
        lines += [f"- {note}" for note in self.notes]
        lines += ["", counts, ""]
        failures = [row for row in self.checks if row["result"] != "passed"]
        if failures:
            table = _table(("check", "error", "bound", "message"), failures)
            lines += ["## Failed", "", *table, ""]
        if self.timings:
            table = _table(TIMINGS, self.timings)
            lines += ["## Seconds a round", "", TIMED, "", *table, ""]
        if self.skipped:
            table = _table(SKIPPED, self.skipped)
            lines += ["## Skipped", "", *table, ""]
        if self.checks:
            table = _table(CHECKS[:5], self.checks)  # without the messages
            lines += ["## Checks", "", *table, ""]
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
    separators = ["---"] * len(columns)
    lines = [_table_row(columns), _table_row(separators)]
    for row in rows:
        texts = [str(row[column]) for column in columns]
        cells = [text.replace("|", "\\|") for text in texts]
        lines.append(_table_row(cells))
    return lines


def _table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
