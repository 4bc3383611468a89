"""The pages of the site, which `mkdocs build --strict` makes of files that are there anyhow.

Pages of docs/ and of the top folder are taken as they are, with their links, since mkdocs knows
them by their paths in the repository; `MOVES` says where they stand on the site. A page for each
protocol is made of its section of docs/protocols.md, of its options and of what it declares; so are
those of the command line, of Python and of result.json. mkdocs calls `on_config` and `on_files`.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md")
# what pages show, and link, beside pages
FILES = (
    "LICENSE", "CITATION.cff", "docs/*.ipynb", "docs/site.css", "benchmarks/results/**/*.png",
    "benchmarks/results/**/*.csv", "securecluster/cli/templates/*.py",
    "securecluster/studies/field_results.csv",
)  # fmt: skip
METHODS = "docs/protocols.md"
METHOD = "docs/protocols-{}.md"  # beside that page, so that links of its sections hold
NOTEBOOK = "docs/{}-notebook.md"
# a page's path, and its place on the site
MOVES = (
    (r"^README", "index"),
    (r"^docs/protocols\.", "methods/index."),
    (r"^docs/protocols-", "methods/"),
    (r"^docs/(.+)-notebook", r"tutorials/\1"),
    (r"^docs/", ""),
)
RARER = ("docs/evidence/", "CHANGELOG.md")  # search shows other pages first
LATER = "---\nsearch:\n  boost: 0.3\n---\n\n"
OF_RUNS = """Options of every method; [each method](../docs/protocols.md) has its own besides. In
Python they are arguments of the same names, with `_` for `-`: those of the method and of privacy of
its class, those of the run of `Settings`."""


class Section(NamedTuple):
    """A protocol's section of docs/protocols.md: name as it is typed, heading, and the text below,
    with its parts as headings.
    """

    name: str
    title: str
    text: str


def on_config(config: Any) -> Any:
    """Put every notebook and protocol into the tree, and the sources where mkdocstrings reads."""
    whole = {
        "tutorials/": [NOTEBOOK.format(path.stem) for path in notebooks()],
        "methods/": [METHODS, *(METHOD.format(own.name) for own in sections())],
    }
    for entry in config.nav:
        for title, pages in entry.items():
            if isinstance(pages, str):
                entry[title] = whole.get(pages, pages)
    # laid out as in the installed package
    config.extra["sources"] = tempfile.TemporaryDirectory()  # which goes with the process
    top = Path(config.extra["sources"].name)
    shutil.copytree(ROOT / "securecluster", top / "securecluster")
    for name in ("protocols", "attacks"):
        shutil.copytree(ROOT / name, top / "securecluster" / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(top)]
    return config


on_config.mkdocs_priority = 100  # type: ignore[attr-defined]  # before mkdocstrings reads its paths


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of docs/ by the pages of the site, known by their paths in ROOT."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path, text in {**site(), **notebook_pages(config, files)}.items():
        page = File.generated(config, path, content=text)
        page.dest_uri = File.generated(config, place(path), content="").dest_uri
        files.append(page)
    for path in paths(FILES):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def notebook_pages(config: Any, files: Any) -> dict[str, str]:
    """Return the text of each notebook's page by its path, and add its pictures to the files."""
    from mkdocs.structure.files import File
    from nbconvert import MarkdownExporter

    found = {}
    for path in notebooks():
        about = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
        text, resources = MarkdownExporter().from_filename(str(path), resources=about)
        for name, data in resources["outputs"].items():
            files.append(File.generated(config, f"docs/{name}", content=data))
        heading, _, rest = redirected(text, METHODS).partition("\n")
        link = f"[This notebook as a file]({path.name}){{ download }}"
        found[NOTEBOOK.format(path.stem)] = f"{heading}\n\n{link}\n{rest}"
    return found


def site() -> dict[str, str]:
    """Return the text of every page but those of notebooks, by its path.

    Paths of pages that are files lead from the top of the repository.
    """
    found = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths(PAGES)}
    found[METHODS] = methods_page()
    found |= {METHOD.format(own.name): method_page(own) for own in sections()}
    found["reference/python.md"] = python_page()
    found["reference/command-line.md"] = command_line_page()
    found["reference/result.md"] = result_page()
    for path, text in found.items():
        found[path] = LATER * path.startswith(RARER) + redirected(text, path)
    return found


def paths(patterns: Iterable[str]) -> list[str]:
    """Return the paths of files from the top of the repository."""
    found = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)))
    return [path.relative_to(ROOT).as_posix() for path in found]


def notebooks() -> list[Path]:
    """Return the notebooks, each of which has a page."""
    return sorted((ROOT / "docs").glob("*.ipynb"))


def place(path: str) -> str:
    """Return a page's place on the site, as if it were a file there."""
    for pattern, new in MOVES:
        path = re.sub(pattern, new, path)
    return path


def redirected(text: str, path: str) -> str:
    """Return a page's text, where links to parts of docs/protocols.md lead to methods' pages, and
    links to notebooks to the pages of these.
    """
    if path.startswith("docs/protocols"):
        text = text.replace("](#", "](protocols.md#")
    for own in sections():
        page = f"protocols-{own.name}.md"
        text = text.replace(f"protocols.md#{slug(own.title)})", f"{page})")
        for heading in re.findall("^## (.+)", own.text, re.M):
            text = text.replace(f"protocols.md#{slug(heading)})", f"{page}#{slug(heading)})")
    return re.sub(r"\]\(([\w./-]+)\.ipynb\)", r"](\1-notebook.md)", text)


def slug(heading: str) -> str:
    """Return a heading's anchor, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def sections() -> tuple[Section, ...]:
    """Return the sections of docs/protocols.md that describe protocols."""
    found = []
    for part in re.split(r"^## ", (ROOT / METHODS).read_text(encoding="utf-8"), flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        name = re.search(r"^`([\w-]+)`: ", body, re.M)
        if name:
            text = re.sub(r"^\*\*([^*\n]+)\.\*\*\s+", r"## \1\n\n", body.strip(), flags=re.M)
            found.append(Section(name[1], title, re.sub("^### ", "## ", text, flags=re.M)))
    return tuple(found)


def methods_page() -> str:
    """Return the page of all methods: what stands before their sections."""
    head = (ROOT / METHODS).read_text(encoding="utf-8").partition("\n## ")[0]
    return head.replace("# Protocols\n", "# Methods\n", 1)


def method_page(own: Section) -> str:
    """Return a method's page: its section, options of its own, what it discloses, evidence."""
    from securecluster.protocols.registry import protocol_class

    kind = protocol_class(own.name)
    return "\n\n".join([
        f"# {own.title}\n\n{own.text}",
        f"## Options of its own\n\n{options_table(kind)}",
        "All others are [options of every method](../reference/command-line.md#run).",
        *disclosed(kind()),
        f"## Protections\n\nWhat its runs can have:\n\n{protections(own.name)}",
        f"## Evidence\n\n{evidence(own)}\n",
    ])  # fmt: skip


def options_table(kind: Any) -> str:
    """Return a table of the options that a protocol has, and the base of all has not."""
    from securecluster.commands import command_line
    from securecluster.core.validation import python_only_fields
    from securecluster.protocols.registry import protocol_class

    shared = {option.name for option in fields(protocol_class(None))}
    rows = []
    in_python = python_only_fields(kind)
    for option in command_line._options(command_line.Section("", kind, all_options=True)):
        if option.field not in shared:
            default = f"`{option.default}`" if option.default else ""
            label = (
                f"{option.field}`, in Python" if option.field in in_python else f"{option.label}`"
            )
            rows.append([f"`{label}", default, escaped(option.text)])
    return table(["option", "default", "meaning"], rows)


def disclosed(method: Any) -> Iterator[str]:
    """Yield what a protocol with its default options declares: views of parties, and messages."""
    views = method.disclosures().of_run(method)
    for readers, sentences in (
        ("the server", views.server),
        ("a local parameter server", views.lps),
        ("other clients", views.clients),
    ):
        if sentences:
            lines = "\n".join(f"- {sentence}" for sentence in sentences)
            yield f"## Learned by {readers} beside replies\n\n{lines}"
    head = ["message", "its reply", "is read", "masked fields", "never masked"]
    yield (
        "## Messages\n\nThe replies that clients can give; which of them a run asks for, its "
        "options say. Some fields are masked, clipped and noised as the run says, and some no mask "
        f"hides.\n\n{table(head, list(messages(method.client)))}"
    )


def messages(client: type) -> Iterator[list[str]]:
    """Yield cells about each reply that depends on a client's data."""
    from securecluster.runtime.release_policy import ReleasePolicy

    words = {"gather": "one by one", "sum": "in a sum", "pairs": "as rows of pairs"}
    for name in dir(client):
        reply = getattr(client, name)
        release = getattr(reply, "__release__", None)
        if isinstance(release, ReleasePolicy) and release.private:
            text = " ".join((reply.__doc__ or "").strip().split("\n\n")[0].split())
            masked, unmasked = map(", ".join, (release.through, release.unmasked))
            read = ", or ".join(words[verb] for verb in release.via)
            yield [f"`{name}`", *map(escaped, (text, read, masked, unmasked))]


def protections(name: str) -> str:
    """Return a table of the values of options that a method and its variants work with."""
    from securecluster.cli.compatibility import OPTIONS, VARIANTS, works_with

    methods = [name, *(variant for variant, (base, _) in VARIANTS.items() if base == name)]
    rows = []
    for option, values in OPTIONS.items():
        cells = []
        for method in methods:
            answers = [f"`{value}` {works_with(method, option, value)}" for value in values]
            known = [answer.removesuffix(" yes") for answer in answers if answer[-3:] != " no"]
            cells.append(", ".join(known))
        # where nothing but the default works, the option is of no use to the method
        if any(cell != f"`{next(iter(values))}`" for cell in cells):
            rows.append([option, *cells])
    return table(["", *(f"`{method}`" for method in methods)], rows)


def evidence(own: Section) -> str:
    """Return links to the pages of evidence that name a protocol, or that its section links."""
    links = []
    for path in paths(["docs/evidence/[a-z]*.md"]):
        text = (ROOT / path).read_text(encoding="utf-8")
        page = path.removeprefix("docs/")
        named = re.search(rf"`{own.name}`|^\| `?{own.name}\b", text, re.M)
        if named or page in own.text or page == f"evidence/{own.name}.md":
            links.append(f"- [{text.partition(chr(10))[0].removeprefix('# ')}]({page})")
    return "\n".join(links) or "No page of evidence names it."


def command_line_page() -> str:
    """Return the page of all commands, with their help."""
    usage, _, _ = printed("--help").partition("\n\nprotocols: ")
    pieces = ["# Command line", f"```text\n{usage}\n```"]
    for command, parts in re.findall(r"^  ([a-z-]+)(?: ([a-z|]+\|[a-z|]+))?", usage, re.M):
        pieces += [f"## {command}", OF_RUNS if command == "run" else ""]
        pieces += [f"```text\n{printed(command, '--help-all')}```"]
        for part in filter(None, parts.split("|")):
            text = printed(command, part, "--help-all")
            pieces += [f"### {command} {part}", f"```text\n{text}```"]
    return "\n\n".join(pieces) + "\n"


def printed(*arguments: str) -> str:
    """Return what a command prints."""
    from securecluster.cli.main import main

    os.environ["COLUMNS"] = "100"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(arguments)
    if code:
        raise SystemExit(f"securecluster {' '.join(arguments)} ended with {code}")
    return output.getvalue()


def python_page() -> str:
    """Return the page of all public names, whose texts are their docstrings."""
    import securecluster
    from securecluster.protocols.registry import protocol_class

    pieces = [
        "# Python",
        "Every public name of `securecluster`. A method takes its options as arguments by name; "
        "its page has their table.",
        "## What every method does",
        documented(securecluster.ClusteringProtocol),
        documented(securecluster.Settings),
        "## What a run leaves",
        "::: securecluster.results.fitted.FittedRun",
        "## Methods",
    ]
    done = {"ClusteringProtocol", "Settings"}
    for own in sections():
        kind = protocol_class(own.name)
        done.add(kind.__name__)
        pieces.append(f"{documented(kind)}\n    options:\n      members: false")
        pieces.append(f"[Its options](../{METHOD.format(own.name)})")
    homes: Mapping[str, str] = securecluster.HOMES
    others = sorted(homes.keys() - done, key=lambda name: (homes[name], name))
    for room, names in groupby(others, lambda name: ".".join(homes[name].split(".")[:2])):
        own_names = (documented(getattr(securecluster, name)) for name in names)
        pieces += [f"## Of {room}", *own_names]
    return "\n\n".join(pieces) + "\n"


def documented(public: Any) -> str:
    """Return the line that mkdocstrings replaces by the docstring of a public name."""
    if isinstance(public, ModuleType):
        return f"::: {public.__name__}"
    return f"::: {public.__module__}.{public.__qualname__}"


def result_page() -> str:
    """Return the page of the entries of result.json and of the files beside it."""
    return (
        "# result.json and the files beside it\n\nThe entries of result.json (`Result`), of a line "
        "of history.jsonl (`RoundLine`), of compare.json (`Comparison`) and of config.json "
        "(`RunConfig`, `ComparisonConfig`, `SweepConfig`), and their types; a [run folder]"
        "(../docs/runs.md) is checked against them when it is opened. `None` is `null`, and what "
        "is `NotRequired` may be absent. Entries that single protocols add are not listed, but for "
        "`lambda` of a round of SR-FCA: the distance up to which clients were joined.\n\n"
        "::: securecluster.folders.schemas\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, without columns that are empty in every row."""
    filled = [k for k in range(len(head)) if any(row[k] for row in rows)]
    lines = [[line[k] for k in filled] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if rows else "None."


def escaped(text: str) -> str:
    """Return a plain text as a cell of a table."""
    text = html.escape(text, quote=False).replace("|", "&#124;")
    return re.sub(r"([\\*_\[\]])", r"\\\1", text)
