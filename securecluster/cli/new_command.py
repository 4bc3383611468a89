"""`securecluster new`: a package with a method, an attack, a mask or a data set of one's own."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from securecluster.commands.command_line import asks_for_help
from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.errors import UsageError, unknown

TEMPLATES = Path(__file__).parent / "templates"
OWN = "securecluster.cli.templates."  # before the module's name in tests of templates
ABOUT = """usage: securecluster new protocol|attack|mask|data DIR

Write a package with a part of your own, its declaration and its tests, which run as they stand:
change the module to what you have in mind. The name of DIR becomes that of the part.
"""
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["securecluster"]

[project.entry-points."securecluster.{group}"]
{name} = "{target}"

[tool.setuptools]
py-modules = ["{module}"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""


class Template(NamedTuple):
    """A module of `TEMPLATES`, which becomes the author's.

    Args:
        name: of the part in it.
        of: its class or function; empty where importing the module is enough.
        group: of entry points, after "securecluster.".
        tries: a command with the part.
    """

    name: str
    of: str
    group: str
    tries: str


KINDS = {
    "protocol": Template("mean-clusters", "MeanClusters", "protocols", "check {name}"),
    "attack": Template("neighbours", "Neighbours", "attacks", "audit RUN --attack {name}"),
    "mask": Template("sign-flips", "", "masks", "run cfl --mask {name}"),
    "data": Template("wine", "wine", "data", "run fedavg --data {name} --scenario iid"),
}


def new(argv: list[str]) -> int:
    """Write a package, and return the exit code.

    Args:
        argv: the kind of the part, and the folder.

    Raises:
        UsageError: an unknown kind, a folder that is in use, or a name that is taken or no name of
            a module.
    """
    if asks_for_help(argv):
        with output():
            print(ABOUT, end="")
        return 0
    if len(argv) != 2:
        raise UsageError("new takes a kind and a folder: securecluster new protocol my-method")
    kind, given = argv
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    folder = Path(given)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: give another folder")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    _check_free(kind, name, folder)
    texts = package(kind, name)
    atomic_files.make_folder(folder / "tests")
    for path, text in texts.items():
        atomic_files.write_atomic(folder / path, text.encode())
    shown = shlex.quote(printable(str(folder)))
    with output():
        print(
            f"{shown}/{name.replace('-', '_')}.py is yours to change; next: pip install -e {shown}"
            f", securecluster {KINDS[kind].tries.format(name=name)}, pytest {shown}"
        )
    return 0


def package(kind: str, name: str) -> dict[str, str]:
    """Return the texts of a package by their paths in its folder.

    Args:
        kind: of `KINDS`.
        name: of the part, with hyphens.
    """
    template = KINDS[kind]
    module = name.replace("-", "_")
    stem = template.name.replace("-", "_")
    # with hyphens it stands in quotes alone
    names = {f'"{template.name}"': f'"{name}"', stem: module}
    names[_class_name(template.name)] = _class_name(name)
    own = re.compile(r"(?<!\w)(" + "|".join(names) + r")(?!\w)")
    texts = {}
    for path, source in ((f"{module}.py", stem), (f"tests/test_{module}.py", f"test_{stem}")):
        text = (TEMPLATES / f"{source}.py").read_text().replace(OWN, "")
        texts[path] = own.sub(lambda match: names[match.group()], text)
    target = f"{module}:{names.get(template.of, template.of)}" if template.of else module
    texts["pyproject.toml"] = PYPROJECT.format(
        name=name, module=module, group=template.group, target=target
    )
    return texts


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


def _check_free(kind: str, name: str, folder: Path) -> None:
    """Raise UsageError for a name that is taken, or no name of a module.

    Args:
        kind: of `KINDS`.
        name: of the part.
        folder: whose name it is.
    """
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise UsageError(
            f"{folder.name} is no name of a Python module: give another folder, such as my-{kind}"
        )
    taken = name in _names(kind)
    # also of another class in the template
    source = (TEMPLATES / f"{KINDS[kind].name.replace('-', '_')}.py").read_text()
    taken |= name != KINDS[kind].name and f"class {_class_name(name)}(" in source
    if taken or module in sys.stdlib_module_names or find_spec(module) is not None:
        owner = kind if taken else "Python module"
        raise UsageError(f"there is a {owner} {name!r} already: give another folder")


def _names(kind: str) -> list[str]:
    """Return the names that parts of a kind have."""
    from securecluster.attacks.registry import attack_names
    from securecluster.data.datasets import source_names
    from securecluster.privacy.masking.masks import mask_names
    from securecluster.protocols.registry import protocol_names

    names = {
        "protocol": protocol_names,
        "attack": attack_names,
        "mask": mask_names,
        "data": source_names,
    }
    return names[kind]()
