"""Summaries of objects: a line for `repr`, and a small table for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

Facts = Mapping[str, str]  # what is said, by its heading


def line(title: str, facts: Facts) -> str:
    """Return a summary in one line, as `<Title: 20 clients, 4 clusters>`.

    Args:
        title: of the object.
        facts: values with their units, by heading; headings are left out.
    """
    return f"<{title}: {', '.join(facts.values())}>"


def table(title: str, facts: Facts) -> str:
    """Return a summary as an HTML table, for `_repr_html_`.

    Args:
        title: of the object.
        facts: values with their units, by heading.
    """
    rows = []
    for heading, value in facts.items():
        cells = f'<th style="text-align: left">{escape(heading)}</th>'
        cells += f'<td style="text-align: left">{escape(value)}</td>'
        rows.append(f"<tr>{cells}</tr>")
    caption = f'<caption style="text-align: left"><b>{escape(title)}</b></caption>'
    return f"<table>{caption}{''.join(rows)}</table>"
