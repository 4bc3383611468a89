"""Charts of pages: no text is cut off, whatever the numbers."""

from __future__ import annotations

import re

import pytest

from securecluster.app import html_page

# of the widest digit or sign in 11 px of the fonts that browsers take for system-ui
WIDEST = 7.0


def cut_off(chart: str) -> list[str]:
    """Return the texts of a chart that reach beyond its left or right end."""
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', chart)
    assert box is not None
    texts = re.findall(r'<text x="(\d+)" y="(\d+)" text-anchor="(\w+)">([^<]*)<', chart)
    assert texts
    beyond = []
    for x, y, anchor, text in texts:
        width = WIDEST * len(text)
        first = float(x) - {"end": width, "middle": width / 2}[anchor]
        if first < 0 or first + width > int(box[1]) or int(y) > int(box[2]):
            beyond.append(text)
    return beyond


@pytest.mark.parametrize("highest", [1.0, 0.236, 0.000123, 123456.0, 1.23e-12])
def test_no_number_of_a_chart_of_bars_is_cut_off(highest: float) -> None:
    for labels in (["0", "1"], ["0"], [str(1000 + k) for k in range(20)]):
        values = [highest] * len(labels)
        for series in ([("true", values)], [("true", values), ("guessed", values)]):
            assert not cut_off(html_page.bars("shares", labels, series))


@pytest.mark.parametrize("highest", [1.0, 0.236, 1.23e-12, 504264.0])
@pytest.mark.parametrize("last", [2.0, 1000.0, 1e6])
def test_no_number_of_a_chart_over_rounds_is_cut_off(highest: float, last: float) -> None:
    assert not cut_off(html_page.steps("ε", [(1.0, 0.0), (last, highest)]))


def test_no_number_of_a_roc_curve_is_cut_off() -> None:
    assert not cut_off(html_page.curves("rates", [("run", [(0.0, 0.0), (1.0, 1.0)])]))
