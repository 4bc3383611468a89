"""Whole files or none, and one sentence when the disk says no."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securecluster.core import atomic_files
from securecluster.errors import OutputError, RunFolderError

OURS = atomic_files.Own(("marker",), re.compile("marker|state|folder(/state)?"))


def fail(code: int) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return failing


def sentence(action: Callable[[], object]) -> str:
    with pytest.raises(RunFolderError) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    return str(caught.value)


class FullStream:
    """A file whose disk fills up half-way."""

    def __init__(self, stream: Any, code: int) -> None:
        self._stream, self._code = stream, code

    def __enter__(self) -> FullStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        self._stream.write(data[: len(data) // 2])
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "replace", "fdopen"])
def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    path = tmp_path / "state"
    atomic_files.write_atomic(path, b"old")
    real = os.fdopen
    broken = (lambda d, m: FullStream(real(d, m), code)) if call == "fdopen" else fail(code)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        said = sentence(lambda: atomic_files.write_atomic(path, b"new and longer"))
    assert str(path) in said
    assert os.strerror(code) in said
    assert "free some space, then resume the run" in said
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_a_first_write_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", fail(errno.ENOSPC))
    sentence(lambda: atomic_files.write_atomic(tmp_path / "state", b"new"))
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_with_the_mode_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    atomic_files.write_atomic(path, b"one", 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    atomic_files.write_atomic(path, b"x" * 100_000)
    assert path.read_bytes() == b"x" * 100_000
    atomic_files.write_atomic(path, b"")
    assert path.read_bytes() == atomic_files.read(path) == b""


def test_a_file_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen, real = tmp_path / "state", [], os.replace

    def look(source: Any, target: Any) -> None:
        seen.append((Path(source).read_bytes(), path.read_bytes()))
        real(source, target)

    atomic_files.write_atomic(path, b"old")
    monkeypatch.setattr(os, "replace", look)
    atomic_files.write_atomic(path, b"new" * 1000)
    assert seen == [(b"new" * 1000, b"old")]


def test_other_troubles_ask_to_check_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for action in (
        lambda: atomic_files.read(tmp_path / "missing"),
        lambda: atomic_files.write_atomic(tmp_path / "missing" / "file", b""),
        lambda: atomic_files.write_atomic(tmp_path / "file" / "below", b""),
        lambda: atomic_files.append_line(tmp_path / "missing" / "file", "x"),
        lambda: atomic_files.make_folder(tmp_path / "file"),
        lambda: atomic_files.make_folder(tmp_path / "file" / "below"),
        lambda: atomic_files.move(tmp_path / "missing", tmp_path / "other"),
    ):
        assert "check the path and its permissions" in sentence(action)
    assert (tmp_path / "file").read_text() == "x"


def test_lines_are_appended_and_folders_made_and_moved(tmp_path: Path) -> None:
    atomic_files.make_folder(tmp_path / "a" / "b")
    atomic_files.make_folder(tmp_path / "a" / "b")
    for line in ("one", "two"):
        atomic_files.append_line(tmp_path / "a" / "b" / "log", line)
    atomic_files.move(tmp_path / "a" / "b", tmp_path / "c")
    assert (tmp_path / "c" / "log").read_bytes() == b"one\ntwo\n"
    assert not (tmp_path / "a" / "b").exists()


def test_a_full_disk_while_appending_or_moving_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_text("x")
    monkeypatch.setattr(os, "replace", fail(errno.ENOSPC))
    monkeypatch.setattr(os, "open", fail(errno.ENOSPC))
    monkeypatch.setattr(Path, "mkdir", fail(errno.ENOSPC))
    for action in (
        lambda: atomic_files.append_line(tmp_path / "log", "x"),
        lambda: atomic_files.move(tmp_path / "old", tmp_path / "new"),
        lambda: atomic_files.make_folder(tmp_path / "folder"),
    ):
        assert "free some space" in sentence(action)
    assert os.listdir(tmp_path) == ["old"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_temporary_file_that_was_put_there_before_is_neither_followed_nor_used(
    tmp_path: Path,
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "clients.safetensors"
    victim.write_bytes(b"precious")
    links = [tmp_path / f".clients.safetensors{end}" for end in (".tmp", ".0123456789abcdef.tmp")]
    for link in links:
        link.symlink_to(victim)
    atomic_files.write_atomic(path, b"secret", 0o600)
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"secret"
    assert not path.is_symlink()
    assert mode(path) == 0o600


def test_a_temporary_file_has_its_permissions_from_the_start_and_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], os.replace

    def look(source: Any, target: Any) -> None:
        seen.append((Path(source).name, mode(Path(source))))
        real(source, target)

    monkeypatch.setattr(os, "replace", look)
    for _ in range(2):
        atomic_files.write_atomic(tmp_path / "secret", b"x", 0o600)
    assert seen[0][0] != seen[1][0]
    assert [atomic_files.final_name(name) for name, _ in seen] == ["secret", "secret"]
    assert [bits for _, bits in seen] == [0o600, 0o600]


def test_a_name_that_is_taken_is_refused_and_what_lies_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / ".state.0123456789abcdef.tmp"
    taken.write_bytes(b"of somebody else")
    taken.chmod(0o666)
    monkeypatch.setattr(
        atomic_files.secrets, "token_hex", lambda count: "0123456789abcdef"[: 2 * count]
    )
    sentence(lambda: atomic_files.write_atomic(tmp_path / "state", b"secret", 0o600))
    assert taken.read_bytes() == b"of somebody else"
    assert os.listdir(tmp_path) == [taken.name]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "state"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    atomic_files.write_atomic(link, b"new")
    assert victim.read_bytes() == b"precious"
    assert not link.is_symlink()


def test_lines_and_private_folders_are_not_written_through_a_link(tmp_path: Path) -> None:
    victim, home = tmp_path / "victim", tmp_path / "home"
    victim.write_bytes(b"precious")
    home.mkdir()
    (tmp_path / "log").symlink_to(victim)
    (tmp_path / "folder").symlink_to(home)
    for action in (
        lambda: atomic_files.append_line(tmp_path / "log", "x"),
        lambda: atomic_files.make_private_folder(tmp_path / "folder"),
    ):
        assert "remove the link that is in its place" in sentence(action)
    assert victim.read_bytes() == b"precious"
    atomic_files.make_new_folder(tmp_path, "folder", OURS)
    assert not (tmp_path / "folder").is_symlink()
    assert home.is_dir()


def test_lines_and_private_folders_have_the_permissions_asked_for(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(mode=0o755)
    for name in ("old", "new"):
        atomic_files.make_private_folder(tmp_path / name)
        assert mode(tmp_path / name) == 0o700
    atomic_files.append_line(tmp_path / "log", "x", 0o600)
    assert mode(tmp_path / "log") == 0o600


def test_what_kills_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    others = [".notes.tmp", ".notes.0123456789abcdef.tmp", "state"]
    for name in (".state.0123456789abcdef.tmp", *others):
        (tmp_path / name).write_bytes(b"x")
    atomic_files.remove_half_written(tmp_path, OURS)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    atomic_files.remove_half_written(tmp_path / "missing", OURS)


def test_a_save_that_is_interrupted_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_files.write_atomic(tmp_path / "state", b"x")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The size that each file or folder had when it was last synced to the disk, by inode."""
    found: dict[int, int] = {}
    real = os.fsync

    def note(descriptor: int) -> None:
        real(descriptor)
        status = os.fstat(descriptor)
        found[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_durable_lines_are_on_the_disk_and_so_is_the_name_of_a_new_file(
    tmp_path: Path, synced: dict[int, int]
) -> None:
    log, home = tmp_path / "log", tmp_path.stat().st_ino
    atomic_files.append_line(tmp_path / "other", "x")
    atomic_files.write_atomic(tmp_path / "another", b"x")
    assert not synced
    atomic_files.append_line(log, "one", durable=True)
    assert synced.pop(log.stat().st_ino) == 4
    assert synced.pop(home, None) is not None
    atomic_files.append_line(log, "two", durable=True)
    assert synced == {log.stat().st_ino: 8}
    synced.clear()
    atomic_files.write_atomic(log, b"anew", durable=True)
    assert set(synced) == {log.stat().st_ino, home}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_found_full_while_syncing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    atomic_files.write_atomic(tmp_path / "state", b"old")
    monkeypatch.setattr(os, "fsync", fail(code))
    for action in (
        lambda: atomic_files.append_line(tmp_path / "log", "x", durable=True),
        lambda: atomic_files.write_atomic(tmp_path / "state", b"new", durable=True),
    ):
        assert "free some space, then resume the run" in sentence(action)
    assert (tmp_path / "state").read_bytes() == b"old"


def test_a_file_system_that_does_not_sync_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def picky(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", picky)
    atomic_files.append_line(tmp_path / "log", "x", durable=True)
    assert (tmp_path / "log").read_bytes() == b"x\n"


@pytest.mark.parametrize("opens_folders", [True, False])
def test_nothing_is_removed_but_below_the_folder(
    opens_folders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system opens no folders, as Windows does not."""
    if not opens_folders:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for made in (folder / "inner", outside):
        made.mkdir(parents=True)
        (made / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "to file").symlink_to(outside / "file")
    (folder / "marker").write_text("ours")
    everything = atomic_files.Own(("marker",), re.compile(r".*", re.DOTALL))
    for path in (outside / "file", Path("../outside/file"), Path(), Path("link/file")):
        with pytest.raises(OSError):
            atomic_files.remove_below(folder, path, everything)
    # a folder that is not empty stays
    with pytest.raises(OSError):
        atomic_files.remove_below(folder, Path("inner"), everything)
    for path in ("to file", "link", "inner/file", "inner", "marker"):
        atomic_files.remove_below(folder, Path(path), everything)
    assert list(folder.iterdir()) == []
    assert (outside / "file").read_text() == "x"


@pytest.mark.parametrize("opens_folders", [True, False])
def test_only_names_of_ours_in_marked_folders_are_removed(
    opens_folders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not opens_folders:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("ours")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("state", "notes", "statement"):
        (folder / name).write_text("x")
    (folder / "folder").mkdir()
    (folder / "folder" / "notes").write_text("x")

    def refused(name: str) -> bool:
        try:
            atomic_files.remove(folder, name, OURS)
        except RunFolderError:
            return True
        return False

    assert refused("state"), "no marker"
    (folder / "marker").symlink_to(elsewhere)
    assert refused("state"), "a link is no marker"
    (folder / "marker").unlink()
    (folder / "marker").mkdir()
    assert refused("state"), "nor is a folder"
    (folder / "marker").rmdir()
    (folder / "marker").write_text("ours")
    assert refused("notes") and refused("statement") and refused("folder/notes")
    with pytest.raises(OSError):
        atomic_files.remove_folder(folder, "folder", OURS)
    assert not refused("state") and not refused("state")
    left = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    assert sorted(left) == ["folder", "folder/notes", "marker", "notes", "statement"]


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing", "folder", "pipe"])
def test_an_output_replaces_nothing_but_an_earlier_one(kind: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "out.json", tmp_path / "victim"
    victim.write_bytes(b"mine")
    if kind == "file":
        path.write_bytes(b"mine")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim if kind == "link" else tmp_path / "nothing")
    before = os.lstat(path)
    with pytest.raises(OutputError, match="was not written by this command"):
        atomic_files.write_output(path, b"ours 2", lambda data: data.startswith(b"ours"))
    assert os.lstat(path) == before and victim.read_bytes() == b"mine"
    other = tmp_path / "other.json"
    for content in (b"ours 1", b"ours 2"):
        atomic_files.write_output(other, content, lambda data: data.startswith(b"ours"))
        assert other.read_bytes() == content


def test_files_that_belong_together_appear_when_all_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"a": b"new a", "b": b"new b"}
    (tmp_path / "a").write_bytes(b"old a")
    with atomic_files.staged(tmp_path, contents, atomic_files.OWNER) as move_in:
        assert (tmp_path / "a").read_bytes() == b"old a" and not (tmp_path / "b").exists()
        move_in()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents
    assert mode(tmp_path / "a") == 0o600
    with pytest.raises(ZeroDivisionError), atomic_files.staged(tmp_path, {"a": b"newer", "c": b""}):
        raise ZeroDivisionError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


def test_a_new_file_replaces_none_and_leaves_no_part_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "frame"
    atomic_files.write_new(path, b"first", atomic_files.OWNER)
    assert stat.S_IMODE(path.stat().st_mode) == atomic_files.OWNER
    assert "File exists" in sentence(lambda: atomic_files.write_new(path, b"second"))
    assert path.read_bytes() == b"first"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    sentence(lambda: atomic_files.write_new(tmp_path / "link", b"second"))
    real = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda d, m: FullStream(real(d, m), errno.ENOSPC))
    sentence(lambda: atomic_files.write_new(tmp_path / "other", b"second"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["frame", "link"]
