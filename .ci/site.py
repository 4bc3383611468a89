"""The pages of the site, which `mkdocs build --strict` makes of files that are there anyhow.

Pages of docs/ and of the top folder are taken as they are, but for their links: on the site a page
may have another place than in the repository. A page for each protocol is made of its section of
docs/protocols.md, of its options and of what it declares; so are those of the command line and of
result.json. mkdocs calls `on_config`, `on_files` and `on_post_build`.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

ROOT = Path(__file__).resolve().parent.parent
# pages of the top folder, by place on the site
TOP = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
METHODS = "docs/protocols.md"
METHODS_INDEX = "methods/index.md"
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|mailto:|data:)([^)#\s]*)(#[^)\s]+)?\)")
REFERENCE = re.compile(r"^(\[[^]\n]+\]:) (?!https?:)([^\s#]+)(#\S+)?$", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
PART = re.compile(r"^\*\*([^*\n]+)\.\*\*\s+", re.MULTILINE)
# search shows other pages first
RARER = "---\nsearch:\n  boost: 0.3\n---\n\n"
COLUMNS = "100"  # of help texts


@dataclass(frozen=True)
class Section:
    """A protocol's section of docs/protocols.md.

    Args:
        name: of the protocol, as it is typed.
        title: its heading.
        text: below the heading, with the four parts.
        more: subsections after them.
    """

    name: str
    title: str
    text: str
    more: str

    @property
    def place(self) -> str:
        """Return its page's place on the site."""
        return f"methods/{self.name}.md"


# --- what mkdocs calls


def on_config(config: Any) -> Any:
    """Put every notebook and protocol into the tree, and the sources where mkdocstrings reads."""
    whole = {
        "tutorials/": [{title: place} for place, title in tutorials().items()],
        "methods/": [METHODS_INDEX, *({own.title: own.place} for own in sections())],
    }
    config.nav = [
        {title: whole.get(pages, pages) if isinstance(pages, str) else pages}
        for entry in config.nav
        for title, pages in entry.items()
    ]
    # mkdocstrings reads sources, laid out as in the installed package
    laid_out = Path(tempfile.mkdtemp()) / "securecluster"
    shutil.copytree(ROOT / "securecluster", laid_out)
    for name in ("protocols", "attacks"):
        shutil.copytree(ROOT / name, laid_out / name)
    python = config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})
    python["paths"] = [str(laid_out.parent)]
    config.extra["laid_out"] = str(laid_out.parent)
    return config


on_config.mkdocs_priority = 100  # before mkdocstrings reads its paths


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of docs/ by the pages of the site."""
    from mkdocs.structure.files import File

    folder = Path(config.docs_dir)
    for file in list(files):
        of_docs = file.abs_src_path is not None and folder in Path(file.abs_src_path).parents
        if of_docs and file.src_uri.endswith((".md", ".ipynb")):
            files.remove(file)
    for place, text in site().items():
        files.append(File.generated(config, place, content=text))
    for place in linked_files():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
    return files


def on_post_build(config: Any) -> None:
    """Remove the copy of the sources."""
    shutil.rmtree(config.extra["laid_out"])


# --- pages


def site() -> dict[str, str]:
    """Return the Markdown text of every page, by its place on the site."""
    found = {}
    for path, place in places().items():
        if place.startswith("tutorials/"):
            found[place] = with_file(moved(notebook(ROOT / path), path, place), path)
        elif path != METHODS:
            found[place] = moved((ROOT / path).read_text(encoding="utf-8"), path, place)
    for place in found:
        if place.startswith("evidence/") or place == "CHANGELOG.md":
            found[place] = f"{RARER}{found[place]}"
    found[METHODS_INDEX] = moved(methods_page(), METHODS, METHODS_INDEX)
    for own in sections():
        found[own.place] = moved(method_page(own), METHODS, own.place)
    found["reference/python.md"] = python_page()
    found["reference/command-line.md"] = command_line_page()
    found["reference/result.md"] = result_page()
    return found


@cache
def places() -> dict[str, str]:
    """Return the place on the site of every page that is a file, by its path."""
    found = dict(TOP)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        found[name] = name.removeprefix("docs/")
    found[METHODS] = METHODS_INDEX
    for path in sorted((ROOT / "docs").glob("*.ipynb")):
        found[f"docs/{path.name}"] = f"tutorials/{path.stem}.md"
    return found


def tutorials() -> dict[str, str]:
    """Return the title of each notebook, by its page's place."""
    found = {}
    for path, place in places().items():
        if place.startswith("tutorials/"):
            heading = re.search(r"^# (.+)$", notebook(ROOT / path), re.MULTILINE)
            found[place] = heading[1] if heading else Path(path).stem
    return found


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: its texts, code, and stored outputs.

    Args:
        path: of the notebook.
    """
    blocks = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            blocks.append(source)
        elif cell["cell_type"] == "code":
            blocks.append(f"```python\n{source}\n```")
            blocks += [block for output in cell["outputs"] for block in _output(output)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def with_file(text: str, path: str) -> str:
    """Return a notebook's text with a link to its file below the heading.

    Args:
        text: of the page.
        path: of the notebook.
    """
    heading, _, rest = text.partition("\n")
    return f"{heading}\n\n[This notebook as a file](../{path}){{ download }}\n\n{rest}"


def _output(output: Mapping[str, Any]) -> Iterator[str]:
    """Yield a cell's output as Markdown: its picture, or else its text."""
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        yield f"![output of the cell above](data:image/png;base64,{picture})"
    elif "text/plain" in data or "text" in output:
        text = "".join(data.get("text/plain", output.get("text", ""))).rstrip()
        yield f"```text\n{text}\n```"


# --- links


def moved(text: str, path: str, place: str) -> str:
    """Return a page's text with links that hold at its place on the site.

    Args:
        text: whose links are those of the file.
        path: of the file that the text is of.
        place: of the page on the site.
    """

    def inline(match: re.Match[str]) -> str:
        mark, words, target, anchor = match.groups()
        link = _moved_link(target, anchor or "", path, place)
        return f"{mark}[{words}]({link})" if link else words

    def reference(match: re.Match[str]) -> str:
        mark, target, anchor = match.groups()
        return f"{mark} {_moved_link(target, anchor or '', path, place)}"

    parts = FENCED.split(text)
    parts[::2] = [REFERENCE.sub(reference, LINK.sub(inline, part)) for part in parts[::2]]
    return "".join(parts)


def _moved_link(target: str, anchor: str, path: str, place: str) -> str:
    """Return a link as it is on the site; empty where it leads to a folder.

    Args:
        target: what the link of the file leads to, without its anchor.
        anchor: with its "#", or empty.
        path: of the file.
        place: of the page on the site.
    """
    aim = _aim(path, target)
    if aim == METHODS:
        aim, anchor = _of_method(anchor)
    elif (ROOT / aim).is_dir():
        return ""
    else:
        aim = places().get(aim, aim)
    return posixpath.relpath(aim, posixpath.dirname(place) or ".") + anchor


def _aim(path: str, target: str) -> str:
    """Return the path that a link of a file leads to."""
    if not target:
        return path
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _of_method(anchor: str) -> tuple[str, str]:
    """Return place and anchor of what a link to docs/protocols.md leads to."""
    wanted = anchor.removeprefix("#")
    for own in sections():
        if wanted == slug(own.title):
            return own.place, ""
        if wanted in [slug(title) for title in re.findall(r"^## (.+)$", own.more, re.MULTILINE)]:
            return own.place, anchor
    return METHODS_INDEX, anchor


def slug(heading: str) -> str:
    """Return a heading's anchor, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def linked_files() -> list[str]:
    """Return the files that are no pages, and that pages link or show."""
    known = places()
    found = {path for path in known if path.endswith(".ipynb")}
    for path in known:
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".ipynb"):
            text = notebook(ROOT / path)
        outside = FENCED.sub("", text)
        targets = [target for _, _, target, _ in LINK.findall(outside)]
        targets += [target for _, target, _ in REFERENCE.findall(outside)]
        for target in targets:
            aim = _aim(path, target)
            if aim not in known and (ROOT / aim).is_file():
                found.add(aim)
    return sorted(found)


# --- methods


@cache
def sections() -> tuple[Section, ...]:
    """Return the sections of docs/protocols.md that describe protocols."""
    text = (ROOT / METHODS).read_text(encoding="utf-8")
    found = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        body, below, more = body.partition("\n### ")
        name = re.search(r"^`([\w-]+)`: ", body, re.MULTILINE)
        if name:
            found.append(
                Section(name[1], title, body.strip(), f"## {more.strip()}\n" if below else "")
            )
    return tuple(found)


def methods_page() -> str:
    """Return the page of all methods: what holds for every one, and a table."""
    from securecluster.protocols.registry import PROTOCOLS

    head = re.split(r"^## ", (ROOT / METHODS).read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    head = head.replace("# Protocols\n", "# Methods\n", 1)
    rows = []
    for own in sections():
        fact = PROTOCOLS[own.name]
        link = f"[{own.title}](protocols.md#{slug(own.title)})"
        rows.append([link, f"`{own.name}`", fact.k, fact.finds, fact.reads])
    return (
        f"{head}## All methods\n\nk: whether the number of clusters must, need not or may be "
        "given.\n\n" + table(["method", "name", "k", "finds", "the server reads"], rows)
    )


def method_page(own: Section) -> str:
    """Return a method's page: idea, options, what is disclosed, deviations and evidence.

    Args:
        own: its section.
    """
    from securecluster.protocols.registry import PROTOCOLS, protocol_class

    fact = PROTOCOLS[own.name]
    kind = protocol_class(own.name)
    paper, *parts = PART.split(own.text)
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    options = options_table(kind, own=True)
    shared = "[options of every method](../reference/command-line.md#run)"
    clusters = {"yes": "must be given", "no": "is found"}.get(fact.k, "may be given")
    finds = f"Finds {fact.finds}; the number of clusters {clusters}."
    if fact.finds.startswith("none: "):
        finds = f"Looks for no clusters: {fact.finds.removeprefix('none: ')}."
    facts = [
        finds,
        f"The server reads {fact.reads}.",
        f"`securecluster run {own.name}`, or `securecluster.{kind.__name__}` in Python.",
    ]
    pieces = [
        f"# {own.title}\n\n{paper.strip()}\n\n{bullets(facts)}",
        f"## Idea\n\n{texts['Idea'].strip()}",
        f"## Options\n\n{texts['Options'].strip()}",
    ]
    if options:
        pieces.append(f"### Options of its own\n\n{options}")
    pieces += [
        f"All others are {shared}.",
        f"## What is disclosed\n\n{texts['What is disclosed'].strip()}\n\n{disclosed(own.name)}",
        f"## Deviations from the paper\n\n{texts['Deviations from the paper'].strip()}",
        own.more.strip(),
        f"## Evidence\n\n{evidence(own)}",
    ]
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def disclosed(name: str) -> str:
    """Return what a protocol declares: messages, what stays visible, and what hides it.

    Args:
        name: of the protocol.
    """
    from securecluster.cli.compatibility import OPTIONS, VARIANTS, works_with
    from securecluster.protocols.registry import protocol_class

    kind = protocol_class(name)
    method = kind()
    pieces = []
    views = method.disclosures().of_run(method)
    for reader, sentences in (
        ("the server learns", views.server),
        ("a local parameter server learns", views.lps),
        ("other clients learn", views.clients),
    ):
        if sentences:
            pieces.append(
                f"Beyond the values of replies, {reader}, with the default options:\n\n"
                + bullets(sentences)
            )
    rows = [[f"`{message}`", *cells] for message, cells in messages(method.client)]
    pieces.append(
        "### Messages\n\nThe replies that clients can give; which of them a run asks for, its "
        "options say. The server reads them one by one or in sums. Some fields are masked, clipped "
        "and noised as the run says, and some no mask hides.\n\n"
        + _filled_table(["message", "its reply", "is read", "masked fields", "never masked"], rows)
    )
    methods = [name, *(variant for variant, (base, _) in VARIANTS.items() if base == name)]
    rows = []
    for option, values in OPTIONS.items():
        cells = [_values_that_work(works_with, own, option, values) for own in methods]
        # where nothing but the default works, the option is of no use to the method
        if any(cell != f"`{next(iter(values))}`" for cell in cells):
            rows.append([option, *cells])
    pieces.append(
        "### Protections\n\nWhat its runs can have:\n\n"
        + table(["", *(f"`{own}`" for own in methods)], rows)
    )
    return "\n\n".join(pieces)


def _values_that_work(
    works_with: Callable[[str, str, str], str], method: str, option: str, values: Iterable[str]
) -> str:
    """Return the values of an option that a method works with, and what these need besides.

    Args:
        works_with: answers for one value: yes, no, or with what else.
        method: name of the protocol, or of a variant.
        option: name of the option.
        values: of the option.
    """
    phrases = []
    for value in values:
        answer = works_with(method, option, value)
        if answer != "no":
            phrases.append(f"`{value}`" + ("" if answer == "yes" else f" {answer}"))
    return ", ".join(phrases)


def messages(client: type) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each reply that depends on a client's data, and cells about it.

    Args:
        client: class of a protocol's clients.
    """
    from securecluster.runtime.release_policy import ReleasePolicy

    words = {"gather": "one by one", "sum": "in a sum", "pairs": "as rows of pairs"}
    for name in dir(client):
        release = getattr(getattr(client, name), "__release__", None)
        if isinstance(release, ReleasePolicy) and release.private:
            first = (getattr(client, name).__doc__ or "").strip().split("\n\n")[0]
            yield (
                name,
                [
                    escaped(_sentence(" ".join(first.split()).removeprefix("Return "))),
                    ", or ".join(words[verb] for verb in release.via),
                    names(release.through),
                    names(release.unmasked),
                ],
            )


def _sentence(text: str) -> str:
    """Return a text with a capital letter in front, unless it begins with a formula."""
    return text[0].upper() + text[1:] if re.match(r"[a-z]+ ", text) else text


def evidence(own: Section) -> str:
    """Return links to the pages of evidence that name a protocol, or that its section links."""
    pages = []
    for path in sorted((ROOT / "docs/evidence").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        named = re.search(rf"`{own.name}`|^\| `?{own.name}\b", text, re.MULTILINE)
        linked = f"evidence/{path.name}" in own.text + own.more
        if path.name != "README.md" and (named or linked):
            title = text.partition("\n")[0].removeprefix("# ")
            pages.append(f"[{title}](evidence/{path.name})")
    return bullets(pages) if pages else "No page of evidence names it."


# --- options and commands


def options_table(kind: Any, own: bool = False, defaults: Mapping[str, Any] | None = None) -> str:
    """Return a table of a class's options; empty where there is none.

    Args:
        kind: dataclass of the options.
        own: only those that the base of all protocols has not.
        defaults: of the command, where they are others than the class's.
    """
    from securecluster.commands import command_line
    from securecluster.protocols.registry import protocol_class

    shared: set[str] = set()
    if own:
        shared = {option.name for option in fields(protocol_class(None))}
    rows = []
    for option in command_line._options(command_line.Section("", kind, None, defaults or {})):
        if option.field not in shared:
            flag, _, takes = option.label.replace(", ", ",").partition(" ")
            label = "<br>".join([*(f"`{name}`" for name in flag.split(",")), takes])
            default = f"`{option.default}`" if option.default else ""
            rows.append([label, default, escaped(option.text)])
    return table(["option", "default", "meaning"], rows) if rows else ""


def command_line_page() -> str:
    """Return the page of all commands, with the options of runs in tables."""
    from securecluster.commands.options import with_common
    from securecluster.protocols.registry import protocol_class

    usage, _, _ = printed("--help").partition("\n\nprotocols: ")
    pieces = [
        "# Command line",
        f"```text\n{usage}\n```",
        "## run",
        "Options of every method; [each method](../methods/index.md) has its own besides. In "
        "Python they are arguments of the same names, with `_` for `-`: those of the method and of "
        "privacy of its class, those of the run of `Settings`.",
        "### Method and privacy",
        options_table(protocol_class(None)),
    ]
    for section in with_common({}).values():
        title = section.title[0].upper() + section.title[1:]
        pieces += [f"### {title}", options_table(section.kind, defaults=section.defaults)]
    commands = re.findall(r"^  ([a-z-]+)(?: ([a-z|]+\|[a-z|]+))?", usage, re.MULTILINE)
    for command, parts in commands:
        if command == "run":
            continue
        pieces += [f"## {command}", f"```text\n{printed(command, '--help-all')}```"]
        for part in parts.split("|") if parts else []:
            pieces += [
                f"### {command} {part}", f"```text\n{printed(command, part, '--help-all')}```"
            ]  # fmt: skip
    return "\n\n".join(pieces) + "\n"


def printed(*arguments: str) -> str:
    """Return what a command prints."""
    from securecluster.cli.main import main

    os.environ["COLUMNS"] = COLUMNS
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(arguments)
    if code or not output.getvalue():
        raise SystemExit(f"securecluster {' '.join(arguments)} ended with {code}")
    return output.getvalue()


# --- Python and result.json

# an entry of history.jsonl that is a word of Python, so that no text can stand below it
LAMBDA = "of SR-FCA: distance up to which clients were joined"
FITTED = "securecluster.results.fitted.FittedRun"
GROUPS = {  # modules of public names, by heading
    "Clusters": ("results.estimator", "parties.run_check", "studies.plan", "studies.sweep"),
    "Data": ("data", "core.client_names"),
    "Finished runs": ("reports.loading", "audits.run_audit"),
    "Other frameworks": (
        "models.foreign",
        "recordings.recording",
        "recordings.training_facts",
        "audits.recording_audit",
    ),
    "Mistakes": ("errors",),
}


def python_page() -> str:
    """Return the page of all public names, whose texts are their docstrings."""
    import securecluster
    from securecluster.protocols.registry import protocol_class

    homes = {name: _home(name) for name in securecluster.__all__}
    pieces = [
        "# Python",
        "Every public name of `securecluster`. A method takes its options as arguments by name; "
        "its page has their table.",
        "## What every method does",
        directive(_source(securecluster.ClusteringProtocol)),
        directive(_source(securecluster.Settings)),
        "## What a run leaves",
        directive(FITTED),
        "## Methods",
    ]
    for own in sections():
        page = f"../methods/{own.name}.md"
        pieces += [
            directive(_source(protocol_class(own.name)), members=False),
            f"[Its options]({page})",
        ]
    done = {protocol_class(own.name).__name__ for own in sections()}
    done |= {"ClusteringProtocol", "Settings", "__version__", "plot"}
    for title, modules in GROUPS.items():
        own_names = [
            name for name in securecluster.__all__ if name not in done and homes[name] in modules
        ]
        pieces += [
            f"## {title}",
            *(directive(_source(getattr(securecluster, name))) for name in own_names),
        ]
        done.update(own_names)
    pieces += ["## Figures", directive("securecluster.plot")]
    left = sorted(set(securecluster.__all__) - done)
    if left:
        raise SystemExit(f".ci/site.py puts no heading over {', '.join(left)}: add it to GROUPS")
    return "\n\n".join(pieces) + "\n"


def _home(name: str) -> str:
    """Return the module that a public name is imported from, without the package."""
    import securecluster

    return securecluster.HOMES.get(name, "").removeprefix("securecluster.")


def _source(public: Any) -> str:
    """Return the dotted name by which a class or function is defined."""
    return f"{public.__module__}.{public.__qualname__}"


def directive(path: str, members: bool = True) -> str:
    """Return the line that mkdocstrings replaces by a docstring.

    Args:
        path: dotted name.
        members: show them, too.
    """
    text = f"::: {path}"
    if not members:
        text += "\n    options:\n      members: false"
    return text


def result_page() -> str:
    """Return the page of the entries of result.json and of the files beside it."""
    from securecluster.core import field_docs
    from securecluster.folders import schemas as contents

    declared = [
        value
        for name, value in vars(contents).items()
        if is_typeddict(value) and not name.startswith("_")
    ]
    links = {kind.__name__: f"[{kind.__name__}](#{slug(kind.__name__)})" for kind in declared}
    pieces = [
        "# result.json and the files beside it",
        "The entries of result.json ([Result](#result)), of a line of history.jsonl "
        "([RoundLine](#roundline)), of compare.json ([Comparison](#comparison)) and of config.json "
        "([RunConfig](#runconfig), [ComparisonConfig](#comparisonconfig), "
        "[SweepConfig](#sweepconfig)), and their types; a [run folder](../runs.md) is checked "
        "against them when it is opened. `None` is `null`. Entries that single protocols add are "
        "not listed.",
    ]
    # what a reader comes for, and then what it consists of
    for kind in sorted(declared, key=lambda kind: kind is not contents.Result):
        rows = []
        texts = {"lambda": LAMBDA} | field_docs._own_descriptions(kind)
        for name, hint in get_type_hints(kind, include_extras=True).items():
            needed = get_origin(hint) is not NotRequired
            text = escaped(_type_in_words(hint if needed else get_args(hint)[0]))
            for other, link in links.items():
                text = re.sub(rf"\b{other}\b", link, text)
            absent = "" if needed else "may be absent"
            meaning = "; ".join(filter(None, [texts.get(name, ""), absent]))
            rows.append([f"`{name}`", text, meaning])
        about = (kind.__doc__ or "").strip()
        if about.startswith("dict("):  # a class by call has no text of its own
            about = ""
        pieces.append(
            f"## {kind.__name__}\n\n{about}\n\n{table(['entry', 'type', 'meaning'], rows)}"
        )
    return "\n\n".join(pieces) + "\n"


def _type_in_words(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and "[" not in str(hint) else str(hint)
    text = re.sub(r"typing\.|securecluster\.runs\.contents\.", "", text)
    return text.replace("NoneType", "None")


# --- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _filled_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in every row."""
    filled = [k for k in range(len(head)) if any(row[k] for row in rows)]
    return table([head[k] for k in filled], [[row[k] for k in filled] for row in rows])


def bullets(items: Iterable[str]) -> str:
    """Return a list as Markdown."""
    return "\n".join(f"- {item}" for item in items)


def names(words: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def escaped(text: str) -> str:
    """Return a plain text as a cell of a table."""
    text = html.escape(text, quote=False).replace("|", "&#124;")
    return re.sub(r"([\\*_\[\]])", r"\\\1", text)
