"""A sweep's summary as a LaTeX table, with the unit of ε and δ, for papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from securecluster.figures.looks import UNITS, name_of

Row = dict[str, Any]  # of the summary
NAME = "summary.tex"
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$", "δ": r"$\delta$", "∞": r"$\infty$",
}  # fmt: skip
DASH = "--"


def table(rows: Sequence[Row], metric: str, title: str, higher: bool = True) -> str:
    """Return the table, which takes the package booktabs.

    Of lines at one level, with the same unit of ε, the best means are bold.

    Args:
        rows: the summary, a line per variant and level.
        metric: the clients' score.
        title: of the sweep, which is the caption.
        higher: True if a larger value of the clients' score is better.
    """
    done = [row for row in rows if row["runs"]]
    scores = [name for name in ("ari", metric) if any(row[name] is not None for row in done)]
    headings = ["method", r"$\varepsilon$ of", r"$\delta$", r"$\varepsilon$", "$z$"]
    headings += ["ARI" if score == "ari" else escaped(score.replace("_", " ")) for score in scores]
    headings += ["MB", "runs"]
    by_target = any(row["chosen"] for row in done)
    if by_target:
        headings.append("chosen")
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escaped(title)}}}",
        rf"  \begin{{tabular}}{{ll{'r' * (len(headings) - 2 - by_target)}{'l' * by_target}}}",
        r"    \toprule",
        f"    {' & '.join(headings)}" + r" \\",
    ]
    variant = None
    for row in done:
        if row["variant"] != variant:
            lines.append(r"    \midrule")
        name = escaped(name_of(row["variant"])) if row["variant"] != variant else ""
        variant = row["variant"]
        cells = [name, *_privacy(row)]
        for score in scores:
            text = _score(row, score)
            rivals = [other for other in done if _level(other) == _level(row)]
            cells.append(rf"\textbf{{{text}}}" if _is_best(row, rivals, score, higher) else text)
        cells += [_number((row["up"] + row["down"]) / 1e6), str(row["runs"])]
        if by_target:
            cells.append(escaped((row["chosen"] or DASH).replace(",", ", ")))
        lines.append(f"    {' & '.join(cells)}" + r" \\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return a text as LaTeX shows it.

    Args:
        text: plain text.
    """
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def _privacy(row: Row) -> list[str]:
    """Return the unit of ε, δ, ε and the noise multiplier of a line."""
    noise = _number(row["noise"])
    if not row["epsilon"]:
        return ["nothing released", DASH, "0", noise]
    unit = row["dp_unit"] if row["dp_unit"] in UNITS else DASH
    delta = DASH if row["delta"] is None else _number(row["delta"])
    return [f"one {unit}" if unit != DASH else DASH, delta, _number(row["epsilon"]), noise]


def _level(row: Row) -> tuple[Any, ...]:
    """Return what lines have in common whose scores can be compared."""
    target = row["target_epsilon"]
    return row["dp_unit"], target, row["noise"] if target is None else None


def _is_best(row: Row, rivals: Sequence[Row], score: str, higher: bool) -> bool:
    """Return whether no other line of a level has a better mean, and one has a worse."""
    values = [rival[score] for rival in rivals if rival[score] is not None]
    best = max if higher or score == "ari" else min
    return len(set(values)) > 1 and row[score] == best(values)


def _score(row: Row, name: str) -> str:
    """Return a mean, with its interval where there is one."""
    if row[name] is None:
        return DASH
    text = f"{row[name]:.3f}" if name in ("ari", "accuracy") else _number(row[name])
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None:
        return text
    return f"{text} [{low:.3f}, {high:.3f}]"


def _number(value: float | None) -> str:
    """Return a number with three significant digits, powers of ten as LaTeX has them."""
    if value is None:
        return DASH
    if math.isinf(value):
        return r"$\infty$"
    digits, _, power = f"{value:.3g}".partition("e")
    if not power:
        return digits
    if digits == "1":
        return f"$10^{{{int(power)}}}$"
    return rf"${digits}\cdot10^{{{int(power)}}}$"
