"""Pages: no text of a chart is cut off, and a copy has the parts that are marked for it alone."""

from __future__ import annotations

import re

import pytest

from securecluster.reports import html_page

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
    assert not cut_off(html_page.curves("rates", ("x", "y"), [("run", [(0.0, 0.0), (1.0, 1.0)])]))


PARTS = ("for the owner", "for all", "not covered", "once more for all")


@pytest.fixture
def page() -> str:
    """A page with parts for different readers."""
    owners, anybody, uncovered, more = map(html_page.paragraph, PARTS)
    return html_page.document(
        "A title",
        [
            html_page.section("Mixed", owners, html_page.shown(anybody), owners),
            html_page.section("Own", owners),
            html_page.section("Beyond", html_page.uncovered(uncovered)),
            html_page.section("Both", html_page.uncovered(uncovered), html_page.shown(more)),
            owners,
        ],
    )


@pytest.mark.parametrize(
    ("with_uncovered", "parts", "headings"),
    [
        (False, {PARTS[1], PARTS[3]}, ["Mixed", "Both"]),
        (True, {*PARTS[1:]}, ["Mixed", "Beyond", "Both"]),
    ],
)
def test_a_copy_has_the_parts_that_are_marked_for_it_alone(
    page: str, with_uncovered: bool, parts: set[str], headings: list[str]
) -> None:
    copy = html_page.handed_over(page, with_uncovered)
    assert {text for text in PARTS if f"<p>{text}</p>" in copy} == parts
    assert re.findall("<h2>(.*)</h2>", copy) == headings
    assert copy.startswith("<!DOCTYPE html>") and copy.endswith("</body>\n</html>\n")
    assert "<!--" not in copy and "<h1>A title</h1>" in copy
    assert copy.count("<section>") == copy.count("</section>") == len(headings)


def test_what_is_no_whole_page_is_handed_over_nowhere(page: str) -> None:
    marks = ["<!--shown-->", "<!--/shown-->", "<!--uncovered-->", "<!--/uncovered-->"]
    damaged = [page.replace(mark, "", 1) for mark in [*marks, "<!--copy-->", "<!DOCTYPE html>"]]
    damaged += [page.replace("<p>for all</p>", f"<p>for all</p>{mark}") for mark in marks]
    damaged += [
        page[: len(page) // 2],
        page[:-1],
        "",
        page.replace("<!--copy-->", "<!--copy-->" * 2),
    ]
    assert all(text != page for text in damaged)
    for text in damaged:
        with pytest.raises(ValueError, match="no whole page"):
            html_page.handed_over(text)


def test_a_text_cannot_mark_itself() -> None:
    for text in ("<!--/shown--> x", "</section>", "<!--shown-->secret<!--/shown-->"):
        section = html_page.section(
            text, html_page.paragraph(text), html_page.table(("",), [(text,)])
        )
        copy = html_page.handed_over(html_page.document(text, [section]))
        assert "<section>" not in copy and "<!--" not in copy
