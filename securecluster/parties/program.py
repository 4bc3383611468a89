"""Digest of the program of a protocol, by which a replay tells a changed program from a server that
used something that no message contained.

The digest is of the code of the modules that define the classes of protocol, clients and state, and
of the version. Imports and the places of files do not count, so a file that moved is no changed
program. It is in no configuration, since noise follows from that. A resumed run keeps the
digest of the program that began it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import securecluster

# a statement by which a module, or names of one, come from other files
IMPORT = re.compile(r"^ *(?:from [\w.]+ import (?:\([^)]*\)|[^\n]*)|import [^\n]*)\n", re.MULTILINE)
UNKNOWN = ""  # program of a run that did not say
APART = "MODULES_APART"  # set in a package whose modules do not depend on each other


def program_digest(*classes: type) -> str:
    """Return the digest of the source of some classes and their bases, and of this version.

    A class in a package counts with all modules of the package's folder, and any other with its own
    module; so does one of a package that sets `MODULES_APART`.

    Args:
        classes: of a protocol, its clients, and its state.

    Returns:
        32 hexadecimal digits; `UNKNOWN` where a class has no source file.
    """
    modules: set[str] = set()
    for made in classes:
        modules.update(base.__module__ for base in made.__mro__)
    # Python, and what it is built on, is not the protocol's program.
    modules = {module for module in modules if not _of_python(module)}
    paths: set[Path] = set()
    for module in modules:
        files = _files(module)
        if not files:
            return UNKNOWN
        paths.update(files)
    digest = hashlib.sha256(securecluster.__version__.encode())
    for code in sorted({_code_digest(path) for path in paths}):
        digest.update(code)
    return digest.hexdigest()[:32]


def _code_digest(path: Path) -> bytes:
    """Return a digest of a file's code, wherever it and what it imports lie."""
    return hashlib.sha256(IMPORT.sub("", path.read_text(encoding="utf-8")).encode()).digest()


def _of_python(module: str) -> bool:
    """Return whether a module belongs to Python's own library."""
    top, _, _ = module.partition(".")
    return top in sys.stdlib_module_names


def _package(module: str) -> str:
    """Return the name of the package of a module; "" where it is in none."""
    loaded = sys.modules.get(module)
    return getattr(loaded, "__package__", None) or ""


def _files(module: str) -> list[Path]:
    """Return the source files that stand for a module; none where it has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return []
    path = Path(file)
    package = _package(module)
    if not package or getattr(sys.modules.get(package), APART, False):
        return [path]
    return sorted(path.parent.glob("*.py"))
