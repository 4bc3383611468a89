"""Summaries of objects in a line and as a table."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from securecluster.core import summaries

FACTS = {"clients": "20 clients", "names": "a <b> & c"}


def test_a_line_has_the_values() -> None:
    assert summaries.line("Thing", FACTS) == "<Thing: 20 clients, a <b> & c>"


def test_a_table_has_a_row_for_each_fact_and_no_markup_from_outside() -> None:
    table = ElementTree.fromstring(summaries.table("Thing <1>", FACTS))
    cells = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert cells == [["clients", "20 clients"], ["names", "a <b> & c"]]
    assert "".join(table.find("caption").itertext()) == "Thing <1>"  # type: ignore[union-attr]
