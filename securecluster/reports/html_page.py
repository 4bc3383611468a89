"""Parts of a self-contained HTML page: text, tables, pictures and charts, all within one file.

Every function returns HTML, and escapes the texts that it is given.

Pages have no scripts, and refuse whatever is not in them. A copy that is handed over has the parts
that are marked for it, and nothing else.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #57606a; --page: #ffffff;
  --line: #d0d7de; --band: #f6f8fa; --good: #1a7f37; --bad: #b42318; --chart: #0969da;
  --other: #bc4c00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9da7b3; --page: #0d1117;
  --line: #30363d; --band: #161b22; --good: #56d364; --bad: #ff7b72; --chart: #58a6ff;
  --other: #ffa657; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.25rem; margin-top: 2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1.05rem; }
.headline { font-size: 1.2rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th { overflow-wrap: normal; }
td { overflow-wrap: break-word; }
td.long { overflow-wrap: anywhere; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.6rem 0.35rem 0;
  border-bottom: 1px solid var(--line); }
pre { background: var(--band); padding: 0.75rem; white-space: pre-wrap; }
figure { margin: 1rem 0; }
figcaption, .note { color: var(--faint); font-size: 0.9rem; }
figure img { max-width: 100%; height: auto; background: #ffffff; }
.pair { display: inline-block; white-space: nowrap; }
.pixels { display: inline-block; margin: 0 0.5rem 0.5rem 0; font-size: 0.8rem; }
.pixels img { display: block; image-rendering: pixelated; width: 5rem; }
svg { max-width: 100%; height: auto; display: block; }
summary { cursor: pointer; margin: 0.75rem 0; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 0.8em; }
.first { background: var(--chart); } .second { border: 2px dashed var(--other); }
svg text { fill: currentColor; font: 11px system-ui, sans-serif; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.seen { color: var(--other); }
@media (max-width: 40rem) {
  table.stack thead { display: none; }
  table.stack tr { display: block; padding: 0.5rem 0; border-bottom: 1px solid var(--line); }
  table.stack td { display: block; border: 0; padding: 0.1rem 0; }
  table.stack td[data-head]::before { content: attr(data-head) ": "; color: var(--faint); }
}
@media print { :root { --text: #000000; --faint: #333333; --page: #ffffff; --line: #999999;
  --band: #ffffff; --good: #000000; --bad: #000000; --chart: #1f4e79; --other: #e39b4e; }
  .seen { color: #000000; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { content-visibility: visible; block-size: auto; opacity: 1; }
  body { max-width: none; font-size: 10pt; }
  h2, h3, summary, thead { break-after: avoid; }
  .head { break-inside: avoid; }
  figure, tr, li, p { break-inside: avoid; } .scroll { overflow: visible; } }
"""
# a browser refuses whatever is not in the page itself, and runs no script
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# parts that a copy to be handed over has, those that it has where their owner says so, and where it
# says which of both it is; no text has these marks, since texts are escaped
SHOWN = "shown"
UNCOVERED = "uncovered"
COPY = "<!--copy-->"
MARK = re.compile(rf"<!--(/?)({SHOWN}|{UNCOVERED})-->")
PART = re.compile(rf"<!--({SHOWN}|{UNCOVERED})-->(.*?)<!--/\1-->", re.DOTALL)
SECTION = re.compile(r"<section>\n(<h2>[^<]*</h2>)\n(.*?)\n</section>", re.DOTALL)
WITHOUT_UNCOVERED = (
    "This copy is to be handed over: it leaves out what no ε covers, such as metrics, true "
    "clusters, clusters that only clients know, names of clients, and pictures."
)
WITH_UNCOVERED = (
    "This copy holds what no ε covers (--with-uncovered): metrics, clusters, names of clients and "
    "pictures of the run, as far as the run has them. Readers must be allowed to have these."
)
END = "\n</body>\n</html>\n"
LONG = "long"  # class of a cell with a word that may be wider than the page
PLAIN = ""  # class of a cell without a meaning of its own
Cell = str | tuple[str, str]  # a text, or a text and the class of its cell


def document(title: str, sections: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: of the page, as plain text.
        sections: as HTML, in their order.
    """
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{COPY}
{body}{END}"""


def shown(*blocks: str) -> str:
    """Return HTML that `handed_over` keeps; what is not marked like this stays with the owner.

    Args:
        blocks: as HTML, without marked parts within them; empty ones are left out.
    """
    return _marked(SHOWN, blocks)


def uncovered(*blocks: str) -> str:
    """Return HTML that no ε covers, which `handed_over` keeps where the owner says so.

    Args:
        blocks: as HTML, without marked parts within them; empty ones are left out.
    """
    return _marked(UNCOVERED, blocks)


def _marked(mark: str, blocks: Iterable[str]) -> str:
    """Return HTML between marks; no text where there is none."""
    content = "\n".join(block for block in blocks if block)
    return f"<!--{mark}-->{content}<!--/{mark}-->" if content else ""


def is_page(data: bytes) -> bool:
    """Return whether a file is a page that `document` made.

    Args:
        data: content of the file.
    """
    return data.startswith(b"<!DOCTYPE html>") and POLICY.encode() in data


def handed_over(page: str, with_uncovered: bool = False) -> str:
    """Return a page with the parts alone that are marked for it.

    A section has its heading if anything of it is left.

    Args:
        page: as `document` made it.
        with_uncovered: keep what no ε covers. Either way the page says so.

    Raises:
        ValueError: this is no such page, or not all of one.
    """
    head, copy, body = page.partition(COPY)
    is_complete = page.startswith("<!DOCTYPE html>") and body.endswith(END)
    if not (is_complete and copy and COPY not in body and _in_pairs(MARK.findall(page))):
        raise ValueError("this is no whole page")
    kinds = {SHOWN, UNCOVERED} if with_uncovered else {SHOWN}
    sections = []
    for heading, content in SECTION.findall(body):
        blocks = [block for mark, block in PART.findall(content) if mark in kinds]
        if blocks:
            sections.append("\n".join(["<section>", heading, *blocks, "</section>"]))
    note = WITH_UNCOVERED if with_uncovered else WITHOUT_UNCOVERED
    return "\n".join([head + paragraph(note, "note"), *sections]) + END


def _in_pairs(marks: Sequence[tuple[str, str]]) -> bool:
    """Return whether every mark of a beginning is followed by that of the same end.

    Args:
        marks: "/" of an end, else "", and the kind of each.
    """
    begins = marks[::2]
    ends = [("/", mark) for slash, mark in begins if not slash]
    return list(marks[1::2]) == ends and len(begins) == len(ends)


def section(heading: str, *blocks: str) -> str:
    """Return a section with a heading; no text where it has no content.

    Args:
        heading: as plain text.
        blocks: as HTML; empty ones are left out.
    """
    content = [block for block in blocks if block]
    if not content:
        return ""
    body = "\n".join(content)
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>"


def subsection(heading: str, *blocks: str) -> str:
    """Return HTML under a heading of the third level, which is printed beside its first block.

    Args:
        heading: as plain text.
        blocks: as HTML.
    """
    first, *others = [*blocks, ""]
    head = f'<div class="head">\n<h3>{escape(heading)}</h3>\n{first}\n</div>'
    return "\n".join([head, *others])


def paragraph(text: str, css_class: str = PLAIN) -> str:
    """Return a paragraph.

    Args:
        text: plain text.
        css_class: its class, such as "note".
    """
    return f"<p{_class(css_class)}>{escape(text)}</p>"


def items(texts: Iterable[str]) -> str:
    """Return a list of sentences; no text if there are none.

    Args:
        texts: plain texts.
    """
    entries = [f"<li>{escape(text)}</li>" for text in texts]
    if not entries:
        return ""
    return "<ul>\n" + "\n".join(entries) + "\n</ul>"


def folded(line: str, *blocks: str) -> str:
    """Return HTML that one line stands for until a reader opens it; no text without parts.

    Args:
        line: plain text.
        blocks: as HTML; empty ones are left out.
    """
    content = [block for block in blocks if block]
    if not content:
        return ""
    body = "\n".join(content)
    return f"<details><summary>{escape(line)}</summary>\n{body}\n</details>"


def headed(statements: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return lists of sentences, each under its heading; those without texts are left out.

    Args:
        statements: a heading and its sentences, as plain texts.
    """
    return [subsection(heading, items(texts)) for heading, texts in statements if texts]


def code(text: str) -> str:
    """Return lines of code.

    Args:
        text: plain text.
    """
    return f"<pre><code>{escape(text)}</code></pre>"


def table(headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table, whose rows become blocks on narrow screens; no text without rows.

    Args:
        headings: of the columns.
        rows: cells of each row.
    """
    lines = []
    for row in rows:
        cells = []
        for heading, cell in zip(headings, row, strict=True):
            text, style = (cell, PLAIN) if isinstance(cell, str) else cell
            # narrow screens show it before the cell
            head = f' data-head="{escape(heading)}"' if heading else ""
            cells.append(f"<td{head}{_class(style)}>{escape(text)}</td>")
        lines.append("<tr>" + "".join(cells) + "</tr>")
    if not lines:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table class="stack"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def picture(png: bytes, caption: str) -> str:
    """Return a picture with a caption.

    Args:
        png: content of a PNG file.
        caption: plain text, which is also the picture's description.
    """
    text = escape(caption)
    return (
        f'<figure><img alt="{text}" src="{data_uri(png)}"><figcaption>{text}</figcaption></figure>'
    )


def pixels(png: bytes, caption: str) -> str:
    """Return a small image, such as a sample, enlarged without smoothing.

    Args:
        png: content of a PNG file.
        caption: plain text.
    """
    text = escape(caption)
    return f'<span class="pixels"><img alt="{text}" src="{data_uri(png)}">{text}</span>'


def data_uri(png: bytes) -> str:
    """Return the address of a picture that contains it.

    Args:
        png: content of a PNG file.
    """
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def bars(caption: str, labels: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return a chart of bars side by side.

    Args:
        caption: plain text.
        labels: below the groups of bars.
        series: name and one value a label, for one series or two.
    """
    highest = max([1e-12, *(value for _, values in series for value in values)])
    top = f"{highest:.3g}"
    margin = _width_of(top) + 8
    widest = max([0, *(_width_of(label) for label in labels)])
    group = max(24 * max(1, len(series)), widest + 6)
    shapes = []
    for s, (_, values) in enumerate(series):
        # the second is hollow: in grey both colours are alike
        style = ('fill="var(--chart)"', 'fill="none" stroke="var(--other)" stroke-width="2"')[s % 2]
        for k, value in enumerate(values):
            height = 120 * max(0.0, value) / highest
            x = margin + group * k + 20 * s
            shapes.append(
                f'<rect x="{x}" y="{140 - height:.1f}" width="18" height="{height:.1f}" {style}/>'
            )
    for k, label in enumerate(labels):
        x = margin + group * k + group // 2
        shapes.append(f'<text x="{x}" y="156" text-anchor="middle">{escape(label)}</text>')
    shapes.append(f'<text x="{margin - 4}" y="26" text-anchor="end">{top}</text>')
    width = margin + group * len(labels) + 10
    return _chart(caption, width, 164, shapes, [name for name, _ in series])


def curves(
    caption: str, axes: tuple[str, str], series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> str:
    """Return a chart of one curve or two in the unit square, with its diagonal, such as a ROC.

    Args:
        caption: plain text.
        axes: names of x and y.
        series: name and points (x, y) in [0, 1].
    """
    across, up = map(escape, axes)
    shapes = [
        '<rect x="50" y="10" width="200" height="200" fill="none" stroke="var(--line)"/>',
        '<line x1="50" y1="210" x2="250" y2="10" stroke="var(--faint)" stroke-dasharray="4"/>',
        f'<text x="150" y="240" text-anchor="middle">{across}</text>',
        f'<text x="14" y="110" text-anchor="middle" transform="rotate(-90 14 110)">{up}</text>',
    ]
    for share in (0, 0.5, 1):
        x, y = 50 + 200 * share, 210 - 200 * share
        shapes.append(f'<text x="{x:g}" y="224" text-anchor="middle">{share:g}</text>')
        shapes.append(f'<text x="44" y="{y + 4:g}" text-anchor="end">{share:g}</text>')
    for s, (_, points) in enumerate(series):
        colour = ("var(--chart)", "var(--other)")[s % 2]
        path = " ".join(f"{50 + 200 * x:.1f},{210 - 200 * y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="6 3"' if s % 2 else ""
        shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
    return _chart(caption, 270, 248, shapes, [name for name, _ in series])


def steps(caption: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a chart of one curve over whole numbers, such as ε over rounds.

    Args:
        caption: plain text.
        points: (x, y), x ascending and y not negative.
    """
    last = max(x for x, _ in points)
    first = min(x for x, _ in points)
    span = max(1.0, last - first)
    highest = max([1e-12, *(y for _, y in points)])
    top = f"{highest:.3g}"
    end = f"{last:g}"
    margin = max(50, _width_of(top) + 10)
    right = margin + 290
    path = []
    for x, y in points:
        path.append(f"{margin + 290 * (x - first) / span:.1f},{140 - 120 * y / highest:.1f}")
    shapes = [
        f'<line x1="{margin}" y1="140" x2="{right}" y2="140" stroke="var(--line)"/>',
        f'<text x="{margin - 6}" y="26" text-anchor="end">{top}</text>',
        f'<text x="{margin - 6}" y="144" text-anchor="end">0</text>',
        f'<text x="{margin}" y="156" text-anchor="middle">{first:g}</text>',
        f'<text x="{right}" y="156" text-anchor="middle">{end}</text>',
        f'<polyline points="{" ".join(path)}" fill="none" stroke="var(--chart)" stroke-width="2"/>',
    ]
    return _chart(caption, right + max(20, _width_of(end)), 164, shapes, [])


def _width_of(text: str) -> int:
    """Return room for a text of a chart, in its units: letters of 11 px are less than 8 wide."""
    return 8 * len(text)


def _chart(
    caption: str, width: int, height: int, shapes: Iterable[str], names: Sequence[str]
) -> str:
    """Return shapes as a figure, with a legend where several series have names."""
    text = escape(caption)
    legend = ""
    if len(names) > 1:
        for k, name in enumerate(names):
            legend += f'<span class="key {("first", "second")[k % 2]}"></span>{escape(name)}'
    drawing = "".join(shapes)
    return (
        f'<figure><svg role="img" aria-label="{text}" viewBox="0 0 {width} {height}" '
        f'width="{width}">{drawing}</svg><figcaption>{text}{legend}</figcaption></figure>'
    )


def _class(css_class: str) -> str:
    """Return a class attribute, or no text for no class."""
    if not css_class:
        return ""
    return f' class="{escape(css_class)}"'
