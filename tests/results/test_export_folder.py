"""A new export takes the place of an earlier one at once, and of nothing else."""

from __future__ import annotations

import errno
import inspect
import json
import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securecluster.errors import RunFolderError, SecureClusterError, UsageError
from securecluster.results import exported_models
from securecluster.results.export_folder import publish

LOADER = inspect.getsource(exported_models)
STEPS = ("replace", "open", "link", "unlink", "mkdir", "rmdir")  # by which the file system changes
Files = dict[str, bytes]


def content_of(files: Files, kind: str) -> dict[str, Any]:
    """Return a `clusters.json` that names some files."""
    named: dict[str, dict[str, str]] = {"cluster": {}, "client": {}}
    for name in files:
        for prefix, entries in named.items():
            if name.startswith(prefix) and not name.endswith(".data"):
                entries[str(len(entries))] = name
    frozen = "frozen.safetensors" if "frozen.safetensors" in files else None
    clusters, own = named.values()
    return {"format": kind, "clusters": clusters, "own": own, "frozen": frozen}


def export(folder: Path, files: Files, kind: str = "safetensors") -> None:
    def write(new: Path) -> None:
        for name, data in files.items():
            (new / name).write_bytes(data)
        if kind == "safetensors":
            (new / "load.py").write_text(LOADER)

    publish(folder, content_of(files, kind), write)


def read_by_loader(folder: Path) -> Files | None:
    """Return what whoever runs load.py reads; None where there is none."""
    if not (folder / "load.py").exists():
        return None
    # not imported: bytecode of another loader of the same second and size would be taken for it
    names = runpy.run_path(str(folder / "load.py"))
    return _named(names["FOLDER"], names["content"]())


def read_by_index(folder: Path) -> Files | None:
    """Return what whoever reads clusters.json reads; None where there is none."""
    if not (folder / "clusters.json").exists():
        return None
    return _named(folder, json.loads((folder / "clusters.json").read_text()))


def _named(folder: Path, content: dict[str, Any]) -> Files:
    files = [*content["clusters"].values(), *content["own"].values()]
    files += [content["frozen"]] if content["frozen"] else []
    return {Path(name).name: (folder / name).read_bytes() for name in files}


def contents(folder: Path) -> Files:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "__pycache__"}


OLD = {
    "cluster0.safetensors": b"old 0",
    "cluster1.safetensors": b"old 1",
    "client2.safetensors": b"o",
}
NEW = {"cluster0.safetensors": b"new 0", "cluster2.safetensors": b"new", "frozen.safetensors": b"f"}
GRAPHS = {"cluster0.onnx": b"graph"}


def in_child(action: Callable[[], None]) -> int:
    """Return how a process of its own ends: its exit code, or minus a signal."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_step(number: int, what: Callable[[], None], counted: list[int]) -> Callable[..., None]:
    """Return a function that has `what` happen at a step of the file system, counted from 0."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        for name in STEPS:
            patch.setattr(os, name, _counting(getattr(os, name), number, what, counted))

    return patched


def _counting(
    real: Callable[..., Any], number: int, what: Callable[[], None], counted: list[int]
) -> Callable[..., Any]:
    def step(*arguments: Any, **options: Any) -> Any:
        counted[0] += 1
        if counted[0] - 1 == number:
            what()
        return real(*arguments, **options)

    return step


@pytest.mark.parametrize("before", [{}, OLD], ids=["first", "again"])
def test_a_kill_at_any_step_leaves_one_export_whole(before: Files, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    if before:
        export(folder, before)
    kept = contents(folder) if before else {}

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_at(number: int) -> int:
        def run() -> None:
            with pytest.MonkeyPatch.context() as patch:
                at_step(number, kill, [0])(patch)
                export(folder, NEW)

        return in_child(run)

    number, states = 0, []
    while (code := killed_at(number)) == -signal.SIGKILL:
        by_loader, by_index = read_by_loader(folder), read_by_index(folder)
        for found in (by_loader, by_index):
            assert found in (before or None, NEW), f"step {number}"
        states.append((by_loader == NEW, by_index == NEW))
        # and the next export goes through, whatever was left
        export(folder, OLD)
        assert set(contents(folder)) == {*OLD, "clusters.json", "load.py"}, f"step {number}"
        _emptied(folder)
        folder.mkdir(exist_ok=True)
        for name, data in kept.items():
            (folder / name).write_bytes(data)
        number += 1
    assert code == 0
    assert number > 20 and states[0] == (False, False) and states[-1] == (True, True)
    assert read_by_loader(folder) == read_by_index(folder) == NEW
    assert set(contents(folder)) == {*NEW, "clusters.json", "load.py"}


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _emptied(path)
            path.rmdir()
        else:
            path.unlink()


def test_a_full_disk_at_any_step_is_said_and_leaves_one_export_whole(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    said, number = 0, 0
    while True:
        export(folder, OLD)
        counted = [0]

        def full() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.MonkeyPatch.context() as patch:
            at_step(number, full, counted)(patch)
            try:
                export(folder, NEW)
            except RunFolderError as error:
                assert "free some space" in str(error)
                said += 1
        found = (read_by_loader(folder), read_by_index(folder))
        assert all(each in (OLD, NEW) for each in found), f"step {number}"
        if counted[0] <= number:
            break
        number += 1
    assert found == (NEW, NEW) and said > 10


def test_a_hard_link_is_let_go_and_its_other_name_kept(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    export(folder, OLD)
    for name in list(contents(folder)):
        os.link(folder / name, tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in contents(folder)}
    export(folder, NEW)
    export(folder, GRAPHS, "onnx")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert set(contents(folder)) == {"cluster0.onnx", "clusters.json"}


NAMES = [
    "../victim", "/tmp/victim", "victim", "", ".", "..", "cluster0.safetensors/../../victim",
    "cluster0.safetensors\n", "clusterA.safetensors", "cluster٣.safetensors", "load.py",
    "clusters.json", "__pycache__", ".export.0123456789abcdef.tmp", "inner/cluster0.safetensors",
    "client-1.onnx", "cluster0.SAFETENSORS", "cluster0.safetensors\0",
]  # fmt: skip


@pytest.mark.parametrize("entry", ["clusters", "own", "frozen", "earlier"])
@pytest.mark.parametrize("name", NAMES)
def test_no_name_in_a_file_leads_to_anything_else(name: str, entry: str, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "exported"
    victim.write_text("precious")
    export(folder, OLD)
    (folder / "inner").mkdir()
    (folder / "inner" / "cluster0.safetensors").write_text("precious")
    content = json.loads((folder / "clusters.json").read_text())
    content[entry] = {"x": name} if entry in ("clusters", "own") else name
    if entry == "earlier":
        content[entry] = [name]
    (folder / "clusters.json").write_text(json.dumps(content))
    before = contents_below(tmp_path)
    with pytest.raises(UsageError, match=r"which no export writes: give a new folder") as caught:
        export(folder, NEW)
    assert "\n" not in str(caught.value)
    assert contents_below(tmp_path) == before


def contents_below(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"5", b"{}", b'{"clusters": [], "own": {}, "frozen": null}',
        b'{"clusters": {"0": 5}, "own": {}, "frozen": null}',
        b'{"clusters": {"0": null}, "own": {}, "frozen": null}',
        b'{"clusters": {}, "own": {}}', b'{"clusters": {}, "own": {}, "frozen": []}',
        b'{"clusters": {}, "own": {}, "frozen": null, "earlier": {"a": 1}}',
        b'{"clusters": {}, "own": ' + b"[" * 100_000, b"\xff\xfe", b"{" * 5, b"\0" * 10,
    ],
)  # fmt: skip
def test_a_damaged_index_is_one_sentence(text: bytes, tmp_path: Path) -> None:
    export(tmp_path, OLD)
    (tmp_path / "clusters.json").write_bytes(text)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="is not what an export writes: give a new folder") as said:
        export(tmp_path, NEW)
    assert "\n" not in str(said.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["clusters.json", "cluster0.safetensors", "load.py", "notes"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_of_an_export_stays(name: str, kind: str, tmp_path: Path) -> None:
    folder, victim = tmp_path / "exported", tmp_path / "victim"
    export(folder, OLD)
    victim.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"mine")
    (folder / name).unlink(missing_ok=True)
    if kind == "link":
        (folder / name).symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    before = victim.read_bytes(), sorted(path.name for path in folder.iterdir())
    with pytest.raises(UsageError, match="which is of no export: give a new folder"):
        export(folder, NEW)
    assert (victim.read_bytes(), sorted(path.name for path in folder.iterdir())) == before


@pytest.mark.parametrize(
    "name", ["cluster7.safetensors", "client0.onnx", "frozen.safetensors", "load.py", "notes.txt"]
)
def test_a_file_that_the_index_does_not_name_stays(name: str, tmp_path: Path) -> None:
    export(tmp_path, OLD)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="which is of no export"):
        export(tmp_path, NEW)
    assert (tmp_path / name).read_text() == "mine"


def test_a_link_to_a_folder_and_a_folder_that_was_imported_from_will_do(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "exported"
    link.symlink_to(tmp_path / "real")
    export(link, OLD)
    (link / "__pycache__").mkdir()
    (link / "__pycache__" / "load.cpython-311.pyc").write_bytes(b"x")
    export(link, NEW)
    assert link.is_symlink() and read_by_loader(link) == NEW
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SecureClusterError):
        export(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_text() == "mine"
