"""Recordings on the disk: damage is refused, and kills and full disks lose nothing unsaid."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import open_transcript
from securecluster.cli.main import main
from securecluster.core.manifest import with_digest
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.recordings.recorded_messages import Exchange, Reply, Sent, Vector
from securecluster.recordings.recording import Recorder
from securecluster.recordings.recording_folder import FACTS, Recording, is_recording
from securecluster.recordings.training_facts import TrainingFacts

NODES = (31, 17, 5)
WIDTH = 4
PRICED = TrainingFacts(lr=0.1, clip=1.0, noise=4.0, placement="local", delta=1e-5)
FILES = (
    "recording.json", "nodes.jsonl", "exchanges.jsonl", "transcript/index.jsonl",
    "transcript/000000.safetensors", "transcript/000002.safetensors",
)  # fmt: skip


def vector(value: float) -> Vector:
    return Vector(torch.full((WIDTH,), value), (("w", (WIDTH,)),))


def pushed(number: int, kind: str = "train") -> Exchange:
    """An exchange with all nodes, of which one does not reply."""
    sent = {node: Sent(kind, str(number), 40, vector(float(number))) for node in NODES}
    replies = {}
    for node in NODES[1:]:
        replies[node] = Reply(vector(float(number + node)), 50, {"loss": 0.5, "num-examples": 9.0})
    return Exchange(kind, str(number), sent, replies)


def write(folder: Path, rounds: Iterator[int] | range, facts: TrainingFacts = PRICED) -> None:
    """Record rounds of training and of evaluation, as a server does."""
    recorder = Recorder(folder, "wards", facts)
    recorder.begin()
    for number in rounds:
        for kind in ("train", "evaluate"):
            exchange = pushed(number, kind)
            with recorder.guarded():
                recorder.announce([exchange])
            recorder.write(exchange, [])
    with recorder.guarded():
        recorder.announce(None)
    recorder.release()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "whole"
    write(folder, range(1, 4))
    return folder


# damage


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    """Return a mutation of a file's lines."""

    def mutate(path: Path) -> None:
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return mutate


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a mutation of a file's bytes."""
    return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]


def instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return a mutation that puts something else in a file's place."""

    def mutate(path: Path) -> None:
        path.unlink()
        make(path)

    return mutate


MUTATIONS: dict[str, Callable[[Path], None]] = {
    "empty": content(lambda data: b""),
    "half": content(lambda data: data[: len(data) // 2]),
    "without its last byte": content(lambda data: data[:-1]),
    "without its last line": lines(lambda found: found[:-1]),
    "without its first line": lines(lambda found: found[1:]),
    "a line twice": lines(lambda found: [*found, found[-1]]),
    "lines swapped": lines(lambda found: found[::-1]),
    "a changed number": content(lambda data: re.sub(rb"\b[0-8]\b", b"9", data, count=1)),
    "a changed last digit": content(lambda data: data[:-20] + b"7" + data[-19:]),
    "zeros": content(lambda data: bytes(len(data))),
    "no JSON": content(lambda data: b"\xff{\n" * 5),
    "other types": content(lambda data: b'{"node": [], "kind": 3, "notes": [], "schema": {}}\n'),
    "deep": content(lambda data: b"[" * 100_000 + b"\n"),
    "text after it": content(lambda data: data + b"junk"),
    "an object after it": content(lambda data: data + b"{}\n"),
    "zeros after it": content(lambda data: data + bytes(100)),
    "a line end after it": content(lambda data: data + b"\n"),
    "gone": instead(lambda path: None),
    "a folder": instead(Path.mkdir),
    "a pipe": instead(os.mkfifo),
    "unreadable": lambda path: path.chmod(0),
    "another file": content(lambda data: b'{"kind": "train", "to": [], "round": 1e999}\n'),
}


@contextmanager
def in_time(seconds: int = 20) -> Iterator[None]:
    """Raise TimeoutError in a context that hangs."""

    def late(*_: object) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def told(folder: Path, capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """Return exit code and output of a command, where seconds and paths are left out."""
    capsys.readouterr()
    with in_time():
        code = main([command[0], str(folder), *command[1:]])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    if code:
        assert len(shown.err.strip().splitlines()) == 1, shown.err
    return code, re.sub(r"[\d.]+ s\b", "", shown.out.replace(str(folder), ""))


def arrays(folder: Path) -> list[Any]:
    """Return all that the transcript of a recording holds."""
    transcript = open_transcript(folder)
    found = []
    for position in range(transcript.count):
        call, response = transcript.content(position)
        found.append((call.query.model.values.tolist(), response.reply.delta.values.tolist()))
    return found


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_refused_or_changes_no_answer(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, mutation: str
) -> None:
    folder = tmp_path / "x"
    shutil.copytree(whole, folder)
    MUTATIONS[mutation](folder / name)
    audit = ("audit", "--attack", "linkage", "--budget", "9", "--out", str(tmp_path / "out"))
    for command in (("report",), audit):
        code, shown = told(folder, capsys, *command)
        if code == 0:
            assert (code, shown) == told(whole, capsys, *command)
        else:
            assert code == 2
    assert told(folder, capsys, "export")[0] == 2
    with in_time():
        with suppress(RunFolderError, UsageError):
            assert arrays(folder) == arrays(whole)
        # it goes on as it was, or not at all
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureClusterWarning)
            try:
                write(folder, range(4, 5))
            except (RunFolderError, UsageError):
                return
    if not is_recording(folder) or mutation == "unreadable":
        return
    found = Recording.read(folder)
    before = Recording.read(whole)
    assert found.exchanges[: len(before.exchanges)] == before.exchanges


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "x"
    shutil.copytree(whole, folder)
    (folder / name).unlink()
    with pytest.raises(RunFolderError, match=f"{name} is missing: restore it"):
        Recording.read(folder)


def test_arrays_are_checked_before_attacks_get_them(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(whole, folder)
    frame = folder / "transcript" / "000001.safetensors"
    frame.write_bytes(frame.read_bytes()[:-1] + b"\xff")
    with pytest.raises(RunFolderError, match=r"000001.safetensors differs"):
        Recording.read(folder).check_arrays()
    assert main(["audit", str(folder), "--attack", "linkage"]) == 2


def test_nothing_is_said_of_a_recording_in_which_nothing_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "x", range(0))
    recorder = Recorder(tmp_path / "y", "wards", PRICED)
    recorder.begin()
    with pytest.warns(SecureClusterWarning), refusing(1, errno.ENOSPC, lasts=True):
        recorder.write(pushed(1), [])
    recorder.announce(None)
    for command in ("report", "audit"):
        for name, said in (("x", "let the app run first"), ("y", "of gaps alone")):
            assert main([command, str(tmp_path / name)]) == 2
            assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("to", [0, 1, 7]),
        ("to", [0, 0, 1]),
        ("down", [1, 2]),
        ("up", [-1, 0, 0]),
        ("updates", 3),
        ("updates", 0),
        ("round", 2),
        ("kind", "query"),
        ("notes", {"9": "no reply"}),
        ("notes", []),
        ("metrics", {"0": {"loss": "x"}}),
        ("index", {"size": 0}),
    ],
)
def test_lines_that_no_app_makes_are_refused_where_their_digests_fit(
    tmp_path: Path, entry: str, value: Any
) -> None:
    folder = tmp_path / "x"
    recording = begun(folder)
    recording.record(pushed(1))
    forged = dict(recording.exchanges[0])
    recording.record(pushed(2))
    forged[entry] = value
    # a forger writes a line as the library does
    rewritten = Recording.read(folder)
    rewritten._lines.path.unlink()
    fresh = Recording(folder, "wards", PRICED)
    fresh._nodes.go_on()
    fresh._lines.append(forged)
    fresh._lines.append(recording.exchanges[1])
    fresh.write_head(None)
    with pytest.raises(RunFolderError):
        Recording.read(folder)


def begun(folder: Path) -> Recording:
    """Return a new recording, without a lock."""
    folder.mkdir()
    return Recording.begin(folder, "wards", PRICED)


def test_earlier_versions_are_refused_in_their_own_sentence(tmp_path: Path) -> None:
    head = {"schema": 1, "app": "x", "facts": {}}
    (tmp_path / FACTS).write_text(json.dumps(head))
    with pytest.raises(RunFolderError, match="earlier version, which nothing guards"):
        Recording.read(tmp_path)
    (tmp_path / FACTS).write_bytes(with_digest({"schema": 3, "app": "x", "facts": {}}))
    with pytest.raises(RunFolderError, match="another version"):
        Recording.read(tmp_path)


# kills


def killed_at(step: int, action: Callable[[], None]) -> bool:
    """Run an action in a process that kills itself at a step on files; return whether it did."""
    process = os.fork()
    if process:
        status = os.waitpid(process, 0)[1]
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counting

    for name in ("open", "fdopen", "fsync", "replace", "mkdir", "chmod", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        action()
    finally:
        os._exit(0)


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_kill_at_any_step_leaves_a_recording_that_goes_on(first: int, tmp_path: Path) -> None:
    seen = set()
    for step in itertools.count(first, 2):
        folder = tmp_path / str(step)
        if not killed_at(step, lambda folder=folder: write(folder, range(1, 2))):  # type: ignore[misc]
            break
        before = lost = 0
        if is_recording(folder):
            left = Recording.read(folder)
            before, lost = len(left.exchanges), len(left.unfinished)
            assert left.gaps == []
            seen.add((before, lost))
        write(folder, range(3, 4))
        found = Recording.read(folder)
        found.check_arrays()
        # what was under way is a gap, and what was never begun is none
        assert (len(found.exchanges), len(found.gaps)) == (before + 2, lost)
        assert found.unfinished == [] and not found.is_open
        assert not list(folder.rglob("*.tmp")) and found.transcript.surplus() == []
        assert [line["round"] for line in found.exchanges[-2:]] == [3, 3]
    # at every exchange, both while it was under way and when it was written
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
    assert step > 60


def test_what_a_kill_leaves_is_counted_when_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "x"
    recorder = Recorder(folder, "wards", PRICED)
    recorder.begin()
    recorder.announce([pushed(1)])
    recorder.write(pushed(1), [])
    recorder.announce([pushed(2)])
    code, shown = told(folder, capsys, "report")
    assert code == 0
    text = " ".join(shown.split())
    assert "1 exchange under way when this was read, or lost" in text
    assert "over 1 round and 1 gap of the recording" in text
    assert "has not ended yet, or was killed" in text


# full disks


@contextmanager
def refusing(step: int, code: int, lasts: bool) -> Iterator[Callable[[], bool]]:
    """Let a step on files fail, or it and all after it, and tell whether it came."""
    count = 0
    with pytest.MonkeyPatch.context() as patch:

        def failing(call: Callable[..., Any]) -> Callable[..., Any]:
            def counting(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == step or (lasts and count > step):
                    raise OSError(code, os.strerror(code))
                return call(*arguments, **options)

            return counting

        for name in ("open", "fdopen", "fsync", "replace", "mkdir", "chmod"):
            patch.setattr(os, name, failing(getattr(os, name)))
        yield lambda: count >= step


@pytest.mark.parametrize(
    ("code", "lasts"),
    [
        (errno.ENOSPC, True),
        (errno.EIO, False),
        pytest.param(errno.ENOSPC, False, marks=pytest.mark.exhaustive),
        pytest.param(errno.EACCES, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_disk_that_refuses_leaves_gaps_and_ends_nothing(
    tmp_path: Path, code: int, lasts: bool
) -> None:
    step = 0
    came = True
    most = 0
    while came:
        step += 1
        folder = tmp_path / str(step)
        recorder = Recorder(folder, "wards", PRICED)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with refusing(step, code, lasts) as has_come:
                recorder.begin()
                for number in (1, 2):
                    recorder.write(pushed(number), [])
                came = has_come()
            recorder.write(pushed(3), [])
            with recorder.guarded():
                recorder.announce(None)
            recorder.release()
        found = Recording.read(folder)
        found.check_arrays()
        assert len(found.exchanges) + len(found.gaps) == 3
        # a lock may try again by itself
        assert bool(found.gaps) <= len(warned) <= 1
        assert found.exchanges[-1]["round"] == 3
        assert not list(folder.rglob("*.tmp")) and found.transcript.surplus() == []
        for gap in found.gaps:
            assert (gap["kind"], gap["messages"]) == ("train", 3)
            assert os.strerror(code) in gap["gap"]
        most = max(most, len(found.gaps))
    assert most == (2 if lasts else 1)
    assert step > 40


def test_a_line_that_is_on_the_disk_although_writing_it_failed_is_no_gap(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x", "wards", PRICED)
    recorder.begin()
    recorder.write(pushed(1), [])
    sync = os.fsync
    target = tmp_path / "x" / "exchanges.jsonl"

    def failing(descriptor: int) -> None:
        sync(descriptor)
        if os.fstat(descriptor).st_ino == target.stat().st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch, pytest.warns(SecureClusterWarning):
        patch.setattr(os, "fsync", failing)
        assert recorder.write(pushed(2), []) is None
    recorder.write(pushed(3), [])
    found = Recording.read(tmp_path / "x")
    assert [line["round"] for line in found.exchanges] == [1, 2, 3] and found.gaps == []


def test_warnings_that_are_errors_end_no_app(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path / "x", "wards", PRICED)
    with refusing(1, errno.ENOSPC, lasts=True):
        recorder.begin()
        recorder.write(pushed(1), [])
    assert capsys.readouterr().err.count("lack messages of this app (cannot make") == 1


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("other")])
def test_what_is_in_the_place_of_a_lock_is_left_alone(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    make(tmp_path / ".lock")
    with in_time(), pytest.raises(RunFolderError, match=r"\.lock is"):
        Recorder(tmp_path, "wards", PRICED).begin()


def test_a_recording_can_be_read_at_any_moment_of_its_writing(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write(folder, range(1, 2))
    process = os.fork()
    if not process:
        write(folder, range(2, 30))
        os._exit(0)
    seen = []
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        found = Recording.read(folder)
        assert found.gaps == [] and len(found.unfinished) <= 1
        seen.append(len(found.exchanges))
    assert seen == sorted(seen) and len(set(seen)) > 2
    assert len(Recording.read(folder).exchanges) == 58


def test_an_app_that_is_stopped_while_it_is_written_goes_on(tmp_path: Path) -> None:
    """Ctrl-C between the line and what this process knows of it."""
    sync = os.fsync
    for step in range(1, 30):
        folder = tmp_path / str(step)
        recorder = Recorder(folder, "wards", PRICED)
        recorder.begin()
        recorder.write(pushed(1), [])
        left = step

        def stopped(descriptor: int) -> None:
            nonlocal left
            sync(descriptor)
            left -= 1
            if not left:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", stopped)
            try:
                recorder.write(pushed(2), [])
            except KeyboardInterrupt:
                pass
            else:
                break
        recorder.write(pushed(3), [])
        recorder.release()
        found = Recording.read(folder)
        found.check_arrays()
        assert [line["round"] for line in found.exchanges] in ([1, 3], [1, 2, 3])
        assert len(found.exchanges) + len(found.gaps) == 3
    assert step > 5


def test_two_servers_of_which_somebody_removed_the_lock_lose_nothing_unsaid(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    recorders = []
    for _ in range(2):
        recorder = Recorder(folder, "wards", PRICED)
        recorder.begin()
        (folder / ".lock").unlink()
        recorders.append(recorder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(1, 7):
            recorders[number % 2].write(pushed(number), [])
        for recorder in recorders:
            recorder.write(pushed(7), [])
            recorder.release()
    found = Recording.read(folder)
    found.check_arrays()
    assert len(found.exchanges) + len(found.gaps) == 8
    assert len(found.exchanges) >= 2 and 1 <= len(warned) <= 2
