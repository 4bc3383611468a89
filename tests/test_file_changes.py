"""One module removes, renames and overwrites files; every other one asks it.

What is removed then has a name of a known form in a folder that is marked as ours, and what a user
names is replaced only by what the same command wrote there before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("securecluster", "protocols", "attacks")
ALLOWED = {"securecluster/core/atomic_files.py"}
# in folders that are made for them and removed with them (`tempfile`)
TEMPORARY = {
    "attacks/ckks_release.py": {"write_bytes"},
    "protocols/conformance/fresh_process.py": {"write_bytes"},
}
# functions of modules that remove, rename, empty or replace what a path names
OF_MODULES = {
    "os": {
        "link", "open", "remove", "removedirs", "rename", "renames", "replace", "rmdir", "symlink",
        "truncate", "unlink",
    },
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move", "rmtree"},
    "pathlib": set(),
}  # fmt: skip
# methods of paths that do so; no other object of the library has methods of these names
OF_PATHS = {
    "hardlink_to", "rename", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
WRITES = set("wax+")  # letters of the modes in which `open` writes
# the one thing that is opened for writing besides files
DEVICES = {"os.devnull"}


def changes(source: str) -> list[str]:
    """Return the calls by which a module changes files, as `line: call`."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = _change(node, names)
            if call is not None:
                found.append(f"{node.lineno}: {call}")
        # as in `patch(os, "unlink")` or `remove = os.unlink`
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id, "")
            if node.attr in OF_MODULES.get(module, set()) - {"open"}:
                found.append(f"{node.lineno}: {module}.{node.attr}")
    return sorted(set(found))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield names in a module, and what of `OF_MODULES` they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in OF_MODULES:
                    yield alias.asname or alias.name, alias.name
        if isinstance(node, ast.ImportFrom) and node.module in OF_MODULES:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _change(node: ast.Call, names: Mapping[str, str]) -> str | None:
    """Return how a call changes files; None where it does not."""
    function = node.func
    if isinstance(function, ast.Name):
        module, _, name = names.get(function.id, "").rpartition(".")
        if name in OF_MODULES.get(module, set()):
            return f"{module}.{name}"
        return "open" if function.id == "open" and _writes(node, 1) else None
    return _method(node, function, names) if isinstance(function, ast.Attribute) else None


def _method(node: ast.Call, function: ast.Attribute, names: Mapping[str, str]) -> str | None:
    """Return how a call of a method, or of a function of a module, changes files."""
    owner = names.get(function.value.id, "") if isinstance(function.value, ast.Name) else ""
    if owner == "os" and function.attr == "open":
        return None if node.args and ast.unparse(node.args[0]) in DEVICES else "os.open"
    if function.attr in OF_MODULES.get(owner, set()):
        return f"{owner}.{function.attr}"
    is_change = {
        # a picture goes into memory first
        "savefig": function.attr == "savefig" and ast.unparse(node.args[0]) != "buffer",
        # `Path.replace` has one argument; those of texts and dataclasses have others
        "replace": len(node.args) == 1 and not node.keywords,
        "open": not owner and _writes(node, 0),
    }
    if function.attr in OF_PATHS or is_change.get(function.attr, False):
        return function.attr
    return None


def _writes(node: ast.Call, position: int) -> bool:
    """Return whether `open` is called with a mode in which it writes, or with one in a variable."""
    modes = [*node.args[position : position + 1]]
    modes += [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    for mode in modes:
        if not isinstance(mode, ast.Constant):
            return position == 1  # other objects, such as masks, are opened, too
        if isinstance(mode.value, str) and set(mode.value) & WRITES:
            return len(mode.value) <= 3
    return False


def sources() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_one_module_changes_files() -> None:
    found = []
    for name, source in sources():
        if name in ALLOWED:
            continue
        for change in changes(source):
            if change.partition(": ")[2] not in TEMPORARY.get(name, set()):
                found.append(f"{name}:{change}")
    assert found == []


def test_that_module_does() -> None:
    (name,) = ALLOWED
    found = {change.partition(": ")[2] for change in changes((ROOT / name).read_text())}
    assert {"os.replace", "os.unlink", "os.rmdir", "os.open", "unlink"} <= found


def test_what_lies_in_temporary_folders_is_all_that_is_left_out() -> None:
    of_files = dict(sources())
    for name, calls in TEMPORARY.items():
        callers = [source for source in of_files.values() if Path(name).stem in source]
        assert any("TemporaryDirectory(" in source for source in (of_files[name], *callers))
        assert {change.partition(": ")[2] for change in changes(of_files[name])} == calls


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.unlink(path)",
        "import os\nos.remove(path)",
        "import os as system\nsystem.replace(a, b)",
        "from os import rename as move\nmove(a, b)",
        "import shutil\nshutil.rmtree(path, ignore_errors=True)",
        "from shutil import move\nmove(a, b)",
        "import shutil\nshutil.copyfile(a, b)",
        "path.unlink(missing_ok=True)",
        "(folder / name).unlink()",
        "folder.rmdir()",
        "path.replace(target)",
        "path.rename(target)",
        "path.write_text('x')",
        "path.write_bytes(data)",
        "open(path, 'w')",
        "figure.savefig(path)",
        "open(path, mode='ab')",
        "open(path, mode)",
        "path.open('r+b')",
        "path.open(mode='x')",
        "import os\nos.open(path, os.O_WRONLY | os.O_TRUNC)",
        "import os\nfor path in paths: clean(os.unlink, path)",
    ],
)
def test_each_way_to_change_a_file_is_found(source: str) -> None:
    assert len(changes(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "names.remove(name)",
        "text.replace('a', 'b')",
        "dataclasses.replace(call, ids=ids)",
        "replace(call, ids=ids)",
        "open(path)",
        "open(path, 'rb')",
        "path.open(encoding='utf-8')",
        "seal.open(table, ids, step)",
        "import os\nos.open(os.devnull, os.O_RDWR)",
        "atomic_files.remove(folder, name, OWN)",
    ],
)
def test_nothing_else_is_taken_for_one(source: str) -> None:
    assert changes(source) == []
