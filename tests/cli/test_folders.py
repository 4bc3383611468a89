"""Run folders: what --force may remove, who may write, and what paths will do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import exhaustive

from securecluster.cli.main import main
from securecluster.core import atomic_files, manifest
from securecluster.errors import RunFolderError, SecureClusterError, UsageError
from securecluster.folders import run_folder
from securecluster.reports.loading import load

SMALL = [
    "--clients", "6", "--clusters", "2", "--samples", "24", "--rounds", "2", "--model", "linear",
    "--quiet",
]  # fmt: skip
RUN = ["run", "fedavg", *SMALL]
LEFT = {"engine": "process", "workers": 0}  # settings of 0.2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run of seed 0."""
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def seed_of(folder: Path) -> object:
    return json.loads((folder / "config.json").read_text())["network"]["seed"]


@pytest.mark.parametrize("config", ['{"model_type": "bert"}', '{"schema": 1}', ""])
def test_force_leaves_folders_of_others_alone(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text(config)
    (project / "src" / "thesis.txt").write_text("years of work")
    before = contents(project)
    assert main([*RUN, "--out", str(project), "--force"]) == 2
    assert "is no run folder and not empty, and nothing deletes it" in capsys.readouterr().err
    assert contents(project) == before


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt", "figure.png", "compare.json", ".notes.tmp", ".models.safetensors.tmp",
        "transcript/notes.safetensors", "transcript/more/a.txt", "transcript/.notes.tmp",
        "old/data.csv", "checkpoint-final/x", "checkpoint-000001/README",
    ],
)  # fmt: skip
def test_force_leaves_files_of_others_alone(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("mine")
    before = contents(run)
    assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 2
    said = capsys.readouterr().err
    assert "which the run in it did not write" in said and said.count("\n") == 1
    assert contents(run) == before
    (run / name).unlink()


@pytest.mark.parametrize("force", [False, True])
def test_what_is_only_called_like_our_bookkeeping_is_left_alone(
    force: bool, tmp_path: Path
) -> None:
    for name in (".securecluster/keys.txt", ".lock/keys.txt", ".securecluster"):
        out = tmp_path / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("precious")
        before = contents(out)
        assert main([*RUN, "--out", str(out), *["--force"] * force]) == 2, name
        assert contents(out) == before


def test_force_leaves_other_runs_in_the_folder_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--out", str(run / "second")]) == 0
    assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 2
    assert "holds second, which the run in it did not write" in capsys.readouterr().err
    out = tmp_path / "compared"
    start = ["compare", "fedavg", "local", *SMALL, "--out", str(out), "--force"]
    assert main(start) == 0
    assert main([*RUN, "--out", str(out / "mine")]) == 0
    assert main([*start, "--seed", "1"]) == 2
    assert seed_of(run) == seed_of(run / "second") == seed_of(out / "mine") == 0


# in this process
NOISES = ["--clip", "1", "--noise", "0", "1", "--seeds", "1", "--jobs", "1"]
STARTS = {
    "run": RUN,
    "compare": ["compare", "fedavg", "local", *SMALL],
    "sweep": ["sweep", "fedavg", *SMALL, *NOISES],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    folders = {kind: tmp_path_factory.mktemp("ended") / kind for kind in STARTS}
    for kind, start in STARTS.items():
        assert main([*start, "--out", str(folders[kind])]) == 0
    return folders


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "share", [0.0, exhaustive(0.2), exhaustive(0.5), exhaustive(0.7), 0.95, 1.0]
)
@pytest.mark.parametrize("kind", STARTS)
def test_a_kill_while_a_folder_is_replaced_leaves_one_that_can_be_replaced(
    kind: str, share: float, ended: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(ended[kind], tmp_path / kind)
    start = [*STARTS[kind], "--out", str(out), "--force"]
    remove = atomic_files.remove_below
    removed: list[Path] = []
    found = run_folder._contents(out)
    kept = [path for path in found.written if path.name == run_folder.LOCK or path in found.runs]
    last = round(share * (len(found.written) - len(kept) - 1))

    def killed(folder: Path, path: Path, own: atomic_files.Own) -> None:
        if len(removed) == last:
            raise KeyboardInterrupt
        removed.append(path)
        remove(folder, path, own)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "remove_below", killed)
        assert main(start) == 130
    assert len(removed) == last
    assert main(start) == 0


def test_force_does_not_follow_links_out_of_a_run_folder(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("years of work")
    (run / "checkpoint-000001").symlink_to(elsewhere)
    assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 2
    assert (elsewhere / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_force_takes_nothing_else_for_a_file_of_a_run(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = run / "checkpoint-000007"
    inner.mkdir()
    (inner / "clock").write_bytes(b"left by a kill")
    assert not run_folder._contents(run).foreign
    (tmp_path / "thesis.txt").write_text("years of work")
    named = inner / "network"
    if kind == "link":
        named.symlink_to(tmp_path / "thesis.txt")
    else:
        named.mkdir()
    assert run_folder._contents(run).foreign == [named]
    assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 2
    assert named.name in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_force_replaces_a_run_in_place(run: Path) -> None:
    inode = run.stat().st_ino
    (run / ".models.safetensors.0123456789abcdef.tmp").write_bytes(b"left by a kill")
    (run / "checkpoint-000007").mkdir()
    (run / "checkpoint-000007" / "clock").write_bytes(b"left by a kill")
    assert main([*RUN, "--seed", "1", "--out", str(run)]) == 2
    assert seed_of(run) == 0
    assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 0
    assert seed_of(run) == 1
    assert run.stat().st_ino == inode, "a mount point could not have been removed"
    assert not (run / ".models.safetensors.0123456789abcdef.tmp").exists() and not list(
        run.glob("checkpoint-*")
    )


def test_of_two_starts_at_once_the_later_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first starts between the second one's check and its claim."""
    target, texts = tmp_path / "run", {"config.json": "{}"}
    first: list[Iterator[Path]] = []
    check = run_folder.check_free

    def check_and_be_overtaken(out: Path | None, force: bool) -> None:
        check(out, force)
        if not first:
            manager = run_folder.claimed(target, False, "first", texts)
            first.append(manager)  # type: ignore[arg-type]
            manager.__enter__()
            (target / "history.jsonl").write_text("what the first one wrote")

    for force in (False, True):
        monkeypatch.setattr(run_folder, "check_free", check_and_be_overtaken)
        with (
            pytest.raises(RunFolderError, match="another process"),
            run_folder.claimed(target, force, "second", texts),
        ):
            pass
        monkeypatch.setattr(run_folder, "check_free", check)
        assert (target / "history.jsonl").read_text() == "what the first one wrote"


def test_what_ended_between_check_and_lock_is_not_replaced(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, check = tmp_path / "new", run_folder.check_free
    passed: list[int] = []

    def check_then_another_run_ends(out: Path | None, force: bool) -> None:
        check(out, force)
        if not passed:
            passed.append(1)
            shutil.copytree(run, target)

    monkeypatch.setattr(run_folder, "check_free", check_then_another_run_ends)
    with (
        pytest.raises(UsageError, match="exists and is not empty"),
        run_folder.claimed(target, False, "x", {"config.json": "{}"}),
    ):
        pass
    assert contents(target) == contents(run)


def test_a_run_that_is_being_written_is_not_replaced(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    with run_folder.locked(run):
        assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert contents(run) == before


def make_folder_of(content: dict[str, object], folder: Path) -> None:
    """Make a folder with a configuration and a marker that agree."""
    folder.mkdir(exist_ok=True)
    data = json.dumps(content).encode()
    (folder / "config.json").write_bytes(data)
    mark = manifest.encode({"config.json": manifest.Mark.of(data)})
    (folder / ".securecluster").write_bytes(mark)


@pytest.mark.parametrize(
    "name",
    ["../victim", "{absolute}", "sub/../../victim", "cfl/../../victim", "..", ".", "", "./fedavg",
     "fedavg/", "FEDAVG", "victim", "transcript", "fedavg:/../victim"],
)  # fmt: skip
@pytest.mark.parametrize("command", ["run", "resume", "report", "replay", "load"])
def test_a_comparison_of_a_folder_elsewhere_touches_nothing(
    command: str, name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, folder = shutil.copytree(finished, tmp_path / "victim"), tmp_path / "folder"
    (victim / "thesis.tex").write_text("years of work")
    (victim / "result.json").unlink()  # so that a resume would go on with it
    before = contents(victim)
    folder.mkdir()
    for inner in ("sub", "cfl", "fedavg"):
        shutil.copytree(finished, folder / inner)
    name = name.format(absolute=victim)
    make_folder_of({"schema": run_folder.SCHEMA, "version": "0", "compare": [name]}, folder)
    if command == "run":
        assert main([*RUN, "--out", str(folder), "--force"]) == 2
        # what the names do not lead to is somebody's
        assert "so --force will not delete it" in capsys.readouterr().err
        for inner in ("sub", "cfl", "fedavg"):
            shutil.rmtree(folder / inner)
        assert main([*RUN, "--out", str(folder), "--force"]) == 0
    elif command == "load":
        with pytest.raises(SecureClusterError, match=r"config\.json .*compare\[0\] is no protocol"):
            load(folder)
    else:
        assert main([command, str(folder)]) == 2
        assert "config.json" in capsys.readouterr().err
    assert contents(victim) == before


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_run_of_a_comparison_that_is_a_link_is_left_alone(
    command: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, folder = shutil.copytree(finished, tmp_path / "victim"), tmp_path / "folder"
    (victim / "result.json").unlink()
    (victim / "manifest.json").unlink()
    before = contents(victim)
    make_folder_of({"schema": run_folder.SCHEMA, "version": "0", "compare": ["fedavg"]}, folder)
    (folder / "fedavg").symlink_to(victim)
    arguments = [command, str(folder)]
    if command == "run":
        arguments = [*RUN, "--out", str(folder), "--force"]
    assert main(arguments) == 2
    assert "fedavg" in capsys.readouterr().err
    assert contents(victim) == before and (folder / "fedavg").is_symlink()


def test_a_run_that_becomes_a_link_between_check_and_removal_leads_nowhere(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, folder = shutil.copytree(finished, tmp_path / "victim"), tmp_path / "folder"
    before = contents(victim)
    make_folder_of({"schema": run_folder.SCHEMA, "version": "0", "compare": ["fedavg"]}, folder)
    shutil.copytree(finished, folder / "fedavg")
    remove = atomic_files.remove_below
    swapped: list[Path] = []

    def remove_after_a_swap(below: Path, path: Path, own: atomic_files.Own) -> None:
        if not swapped and path.parent.name == "fedavg":
            (folder / "fedavg").rename(tmp_path / "moved")
            (folder / "fedavg").symlink_to(victim)
            swapped.append(path)
        remove(below, path, own)

    monkeypatch.setattr(atomic_files, "remove_below", remove_after_a_swap)
    assert main([*RUN, "--out", str(folder), "--force"]) == 2
    assert swapped and contents(victim) == before


def test_a_file_that_comes_between_check_and_removal_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove = atomic_files.remove_below

    def remove_after_a_note(below: Path, path: Path, own: atomic_files.Own) -> None:
        (run / "notes.txt").write_text("mine")
        (run / "transcript" / "notes.txt").write_text("mine")
        remove(below, path, own)

    monkeypatch.setattr(atomic_files, "remove_below", remove_after_a_note)
    assert main([*RUN, "--out", str(run), "--force"]) == 2
    assert "cannot remove all of the run" in capsys.readouterr().err
    assert (run / "notes.txt").read_text() == (run / "transcript/notes.txt").read_text() == "mine"


def test_files_with_a_second_name_elsewhere_keep_their_content(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("years of work")
    (run / "history.jsonl").unlink()
    (run / "history.jsonl").hardlink_to(mine)
    assert main([*RUN, "--seed", "1", "--out", str(run), "--force"]) == 0
    assert mine.read_text() == "years of work"
    for name in (".lock", "result.json", "manifest.json"):
        (run / name).unlink(missing_ok=True)
    (run / ".lock").hardlink_to(mine)
    assert main(["resume", str(run)]) == 2
    assert ".lock is a link to another file" in capsys.readouterr().err
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(mine)
    assert main(["resume", str(run)]) == 2
    assert mine.read_text() == "years of work"
    (run / ".lock").unlink()
    with pytest.raises(RunFolderError, match="one file under several names"):
        (run / "ledger.jsonl").unlink(missing_ok=True)
        (run / "ledger.jsonl").hardlink_to(mine)
        atomic_files.append_line(run / "ledger.jsonl", "a release")
    assert mine.read_text() == "years of work"


def test_a_folder_is_called_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds: dict[str, dict[str, object]] = {
        "sweep": {"sweep": {}, "data_digest": "x"},
        "comparison": {"compare": ["cfl", "local"]},
        "run": {"protocol": {}},
    }
    for kind, entries in kinds.items():
        folder = tmp_path / kind
        make_folder_of({"schema": run_folder.SCHEMA, "version": "0", **entries}, folder)
        assert main([*RUN, "--out", str(folder)]) == 2
        assert f"--force to replace the {kind} in it" in capsys.readouterr().err
        (folder / "notes.txt").write_text("mine")
        assert main([*RUN, "--out", str(folder), "--force"]) == 2
        assert f"notes.txt, which the {kind} in it did not write" in capsys.readouterr().err


def test_the_folder_that_one_stands_in_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    assert main([*RUN, "--out", "."]) == 0
    assert seed_of(home) == 0
    assert main([*RUN, "--out", ".", "--seed", "1"]) == 2
    assert seed_of(home) == 0
    assert main([*RUN, "--out", ".", "--seed", "1", "--force"]) == 0
    assert seed_of(home) == 1
    assert Path.cwd() == home
    assert main(["replay", "."]) == 0


@pytest.mark.exhaustive
def test_a_link_to_a_run_stays_a_link(run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    assert main([*RUN, "--out", str(link), "--seed", "1"]) == 2
    assert seed_of(run) == 0
    assert main([*RUN, "--out", str(link), "--seed", "1", "--force"]) == 0
    assert link.is_symlink() and seed_of(run) == 1


@pytest.mark.parametrize("force", [False, True])
def test_paths_that_are_no_folders_get_a_sentence(
    force: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(os.listdir(tmp_path))
    for name in ("file", "nowhere", "loop", "x" * 300, "file/below"):
        assert main([*RUN, "--out", str(tmp_path / name), *["--force"] * force]) == 2, name
        said = capsys.readouterr().err
        assert said.startswith("securecluster: ") and said.count("\n") == 1, said
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_start_that_was_killed_before_its_configuration_leaves_the_folder_free(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").touch()
    (out / "..securecluster.0123456789abcdef.tmp").write_text('{"sche')
    (out / ".config.json.0123456789abcdef.tmp").write_text('{"sche')
    assert main([*RUN, "--out", str(out)]) == 0
    assert seed_of(out) == 0


def test_checkpoints_that_a_kill_at_the_very_end_left_are_removed(run: Path) -> None:
    (run / "checkpoint-000009").mkdir()
    (run / "checkpoint-000009" / "clients").write_bytes(b"keys")
    assert main(["resume", str(run), "--quiet"]) == 0
    assert not list(run.glob("checkpoint-*"))


def test_a_comparison_that_has_ended_is_shown_without_a_word_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "fedavg", "local", *SMALL, "--out", str(out)]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with run_folder.locked(out):  # as on a medium that cannot be written
        assert main(["resume", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "fedavg" in printed and f"{out} is complete" in printed
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    table = (out / "compare.json").read_text()
    for text in (table.replace('"clients": 6', '"clients": 7'), "", "{"):
        (out / "compare.json").write_text(text)
        assert main(["resume", str(out), "--quiet"]) == 0
        assert (out / "compare.json").read_text() == table, "it is made of the runs' folders"


def test_a_start_that_cannot_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunFolderError("cannot write: free some space")

    monkeypatch.setattr(run_folder.atomic_files, "write_atomic", full)
    with (
        pytest.raises(RunFolderError),
        run_folder.claimed(tmp_path / "a" / "out", False, "x", {"config.json": "{}"}),
    ):
        pass
    assert not (tmp_path / "a" / "out").exists()


def test_a_stopped_run_is_not_resumed_by_two(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").unlink()
    (run / "manifest.json").unlink()
    with run_folder.locked(run):
        assert main(["resume", str(run)]) == 2
    assert "another process" in capsys.readouterr().err


def test_folders_that_are_none_are_not_locked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("resume", "replay"):
        assert main([command, str(tmp_path)]) == 2
        assert "is not a run folder (it has no config.json)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stopped", [True, False])
def test_folders_with_settings_that_have_left_go_on(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = run_folder.config_content

    def earlier(*arguments: Any) -> dict[str, Any]:
        written = content(*arguments)
        written["settings"] |= LEFT
        return written

    federation = cases.two_clusters(6, 24)
    report = cases.interrupt_after(2) if stopped else lambda line: None
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(run_folder, "config_content", earlier)
        cases.variant("fedavg", rounds=3, model="linear").fit(
            federation, folder=tmp_path, report=report
        )
    assert json.loads((tmp_path / "config.json").read_text())["settings"].items() >= LEFT.items()
    fitted = cases.variant("fedavg", rounds=3, model="linear").fit(federation, folder=tmp_path)
    assert len(fitted.history_) == 3
