"""Audits whose files are damaged, changed or in the way, and disks that refuse."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import SMALL_FEDERATION
from forging import MISSING, entries, forged

from securecluster.audits import audit_files, audit_overview
from securecluster.audits import run_audit as audit
from securecluster.cli.main import main
from securecluster.core import atomic_files, manifest
from securecluster.errors import RunFolderError
from securecluster.reports import html_page
from securecluster.reports.finished_run import FinishedRun, open_run

RUN = ["run", "fedavg", *SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
# an attack with a score, one that says something, and one that does not apply
ATTACKS = ["label-counts", "label-distributions", "mean-image"]
WORD = "what-nobody-listed"
DEEP = "[" * 100_000
NESTED: list[Any] = []
for _ in range(200):
    NESTED = [NESTED]
VALUES = {
    "missing": MISSING, "null": None, "list": [], "object": {}, "text": "x", "negative": -1,
    "huge": 10**400, "nested": NESTED, "NaN": float("nan"), "true": True, "row": [None],
}  # fmt: skip
TABLE, PAGE, DIGESTS = (f"audit-server.{ending}" for ending in ("json", "html", "manifest"))


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an audit of two adversaries."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    assert main([*RUN, "--mask", "permutation", "--out", str(folder)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "attack_names", lambda: ATTACKS)
        for party in ("server", "wire"):
            assert main(["audit", str(folder), "--as", party, "--quiet"]) == 0
    return folder


@pytest.fixture
def folder(audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of one's own, whose next audits take no time."""
    made: dict[str, audit.Audit] = {}
    whole = audit.audited

    def remembered(run: Any, clients: Any, adversary: Any, *rest: Any) -> audit.Audit:
        if adversary.text not in made:
            made[adversary.text] = whole(run, clients, adversary, *rest)
        return made[adversary.text]

    monkeypatch.setattr(audit, "attack_names", lambda: ATTACKS)
    monkeypatch.setattr(audit, "audited", remembered)
    return Path(shutil.copytree(audited, tmp_path / "run", symlinks=True))


def fitting(folder: Path) -> None:
    """Make the digests of the server's audit fit, as whoever changes both files can."""
    marks = {name: manifest.Mark.of_file(folder / name) for name in (TABLE, PAGE)}
    (folder / DIGESTS).write_bytes(manifest.encode(marks))


def handed_over(folder: Path, run: FinishedRun) -> tuple[dict[str, str], list[str]]:
    """Return what a bundle has of a folder's audits, and what is said of those that it has not."""
    kept, refused = audit_files.kept(folder, run)
    audit_files.overview(folder, kept, run)
    texts = audit_files.handed_over(kept, run)
    texts |= {f"uncovered {name}": text for name, text in shown_to_all(kept, run).items()}
    return texts, refused


def shown_to_all(kept: list[audit_files.Kept], run: FinishedRun) -> dict[str, str]:
    return audit_files.handed_over(kept, run, with_uncovered=True)


@pytest.mark.always
def test_a_table_with_any_change_is_in_no_bundle_also_with_digests_that_do_not_belong_to_it(
    audited: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(audited, tmp_path / "run"))
    run = open_run(folder)
    table = json.loads((folder / TABLE).read_text())
    row = next(k for k, row in enumerate(table["attacks"]) if row["run"]["score"])
    for path, value in (
        (("attacks", row, "run", "verdict"), "no better than chance"),
        (("attacks", row, "run", "score", "value"), 0.0),
        (("attacks",), []),
        (("summary",), "Nothing could be learned."),
    ):
        text = json.dumps(forged(table, path, value), indent=2)
        # a digest within the file that fits guards nothing
        for damaged in (text, json.dumps({**json.loads(text), "sha256": manifest.digest(b"")})):
            (folder / TABLE).write_text(damaged)
            texts, (sentence,) = handed_over(folder, run)
            assert not [name for name in texts if "server" in name]
            assert TABLE in sentence and "make this audit again" in sentence


def test_a_page_with_any_change_is_in_no_bundle(audited: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(audited, tmp_path / "run"))
    run = open_run(folder)
    whole = (folder / PAGE).read_text()
    assert "Labels of client" in whole
    for text in (
        whole.replace("better than chance", "at chance"),
        whole.replace("<!--shown-->", "", 1),
        whole[:-9],
        whole[: len(whole) // 2],
        "Labels of client 0",
        "",
    ):
        (folder / PAGE).write_text(text)
        texts, refused = handed_over(folder, run)
        assert not [name for name in texts if "server" in name] and len(refused) == 1
    # digests that fit do not make a page of what is none
    (folder / PAGE).write_text(whole.replace("<!--/shown-->", "", 1))
    fitting(folder)
    assert len(handed_over(folder, run)[1]) == 1


@pytest.mark.parametrize("kind", VALUES)
def test_a_table_whose_digests_fit_is_read_with_its_types_or_left(
    kind: str, audited: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(audited, tmp_path / "run"))
    run = open_run(folder)
    table = json.loads((folder / TABLE).read_text())
    outcomes = set()
    paths = list(entries(table))
    assert len(paths) > 40
    for path in paths:
        (folder / TABLE).write_text(json.dumps(forged(table, path, VALUES[kind])))
        fitting(folder)
        texts, refused = handed_over(folder, run)
        assert len(refused) <= 1 and "audit-wire.json" in texts
        outcomes.add(bool(refused))
    assert True in outcomes


def test_an_entry_that_nobody_listed_stays_wherever_it_is(audited: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(audited, tmp_path / "run"))
    run = open_run(folder)
    table = json.loads((folder / TABLE).read_text())
    objects = [path for path in entries(table) if isinstance(at(table, path), dict)]
    assert ("attacks", 0, "run", "score", "interval") in objects
    for path in [(), *objects]:
        for value in (WORD, [WORD], {"value": WORD}, {WORD: 1}):
            (folder / TABLE).write_text(json.dumps(forged(table, (*path, "unlisted"), value)))
            fitting(folder)
            texts, refused = handed_over(folder, run)
            assert refused == [] and "audit-server.json" in texts
            assert not [name for name, text in texts.items() if WORD in text or "unlisted" in text]


def at(content: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path."""
    for name in path:
        content = content[name]
    return content


def in_place(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return a damage that puts something else in a file's place."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def written(name: str, data: bytes) -> Callable[[Path], None]:
    return in_place(name, lambda path: path.write_bytes(data))


def of_table(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a damage of the table's bytes."""

    def damage(folder: Path) -> None:
        (folder / TABLE).write_bytes(change((folder / TABLE).read_bytes()))

    return damage


TEXTS = {
    "empty": b"", "deep": DEEP.encode(), "NUL": b"\0" * 50, "no UTF-8": b"\xff\xfe",
    "null": b"null", "a number": b"5", "a list": b"[]", "an object": b"{}", "NaN": b"NaN",
    "another schema": b'{"schema": 9}',
}  # fmt: skip
DAMAGES: dict[str, Callable[[Path], None]] = {
    "table cut": of_table(lambda data: data[: len(data) // 2]),
    "table without its end": of_table(lambda data: data[:-3]),
    "entry twice": of_table(lambda data: data.replace(b"{", b'{"schema": 3, ', 1)),
    "NUL within": of_table(lambda data: data.replace(b"chance", b"ch\0nce", 1)),
    **{f"{name} {kind}": written(name, data) for name in (TABLE, PAGE, DIGESTS)
       for kind, data in TEXTS.items()},
    **{f"{name} missing": in_place(name, lambda path: None) for name in (PAGE, DIGESTS)},
    **{f"{name} a folder": in_place(name, Path.mkdir) for name in (TABLE, PAGE, DIGESTS)},
    **{f"{name} a FIFO": in_place(name, os.mkfifo) for name in (TABLE, PAGE, DIGESTS)},
    **{f"{name} a link to nothing": in_place(name, lambda path: path.symlink_to("nothing"))
       for name in (TABLE, PAGE, DIGESTS)},
    **{f"{name} a link to itself": in_place(name, lambda path: path.symlink_to(path.name))
       for name in (TABLE, PAGE, DIGESTS)},
    **{f"{name} a link to another file": in_place(name, lambda path: path.symlink_to("result.json"))
       for name in (TABLE, PAGE, DIGESTS)},
    **{f"{name} a link to a FIFO": in_place(name, lambda path: (
        os.mkfifo(path.with_name(".pipe")), path.symlink_to(".pipe")))
       for name in (TABLE, PAGE, DIGESTS)},
}  # fmt: skip


def of_audits(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("audit")}


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_audit_is_named_in_one_sentence_and_ends_no_later_one(
    damage: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](folder)
    before = of_audits(folder)
    capsys.readouterr()
    bundle = tmp_path / "all.zip"
    assert main(["audit", str(folder), "--as", "wire", "--bundle", str(bundle), "--quiet"]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and TABLE in said and "in no bundle" in said, said
    with zipfile.ZipFile(bundle) as archive:
        assert not [name for name in archive.namelist() if "server" in name]
        assert "audit-wire.json" in archive.namelist()
    # nothing that was there was taken away
    assert before <= of_audits(folder)
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()
    code = main(["audit", str(folder), "--quiet"])
    said = capsys.readouterr().err
    assert code in (0, 2) and said.count("\n") == (code == 2), said
    if code == 0:
        kept, refused = audit_files.kept(folder, open_run(folder))
        assert [audit.name for audit in kept] == ["audit-server", "audit-wire"] and refused == []


def test_a_damaged_frame_is_one_sentence_before_any_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*RUN, "--transcript", "full", "--out", str(run)]) == 0
    frame = max((run / "transcript").glob("*.safetensors"))
    whole = frame.read_bytes()
    for damage in (lambda: frame.write_bytes(whole[:-1]), frame.unlink, lambda: os.mkfifo(frame)):
        damage()
        capsys.readouterr()
        assert main(["audit", str(run), "--attack", *ATTACKS]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and frame.name in said.err and not said.out
        assert not list(run.glob("audit*"))


@pytest.mark.parametrize("name", [audit_overview.NAME, "audit-wire.html", "audit-wire.manifest"])
def test_what_is_in_the_way_is_named_before_minutes_of_work(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    monkeypatch.setattr(audit, "audited", None)  # is not reached
    assert main(["audit", str(folder), "--as", "wire"]) == 2
    said = capsys.readouterr().err
    assert name in said and "is no file, and in the place of one" in said


class Refusing:
    """A disk that refuses the k-th time that a file is opened, written to or moved.

    Args:
        patch: for the test's time.
        code: number of the error.
        turn: k, from 0.
    """

    def __init__(self, patch: pytest.MonkeyPatch, code: int, turn: int) -> None:
        self.left = turn
        self.code = code
        for name in ("open", "fdopen", "replace"):
            patch.setattr(atomic_files.os, name, self._counting(getattr(os, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*arguments: Any, **options: Any) -> Any:
            frame = __import__("sys")._getframe(1)
            if frame.f_globals.get("__name__") == atomic_files.__name__:
                self.left -= 1
                if self.left == -1:
                    raise OSError(self.code, os.strerror(self.code))
            return function(*arguments, **options)

        return refusing


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_leaves_the_run_and_whole_audits(
    code: int, audited: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {name: data for name, data in contents(audited).items() if "audit" not in name}
    run = open_run(folder)
    bundle = tmp_path / "b.zip"
    command = ["audit", str(folder), "--as", "wire", "--with", "client:1", "--quiet"]
    assert main([*command, "--bundle", str(bundle)]) == 0
    handed = bundle.read_bytes()
    capsys.readouterr()
    codes = []
    for turn in range(40):
        with pytest.MonkeyPatch.context() as patch:
            disk = Refusing(patch, code, turn)
            codes.append(main([*command, "--bundle", str(bundle)]))
        said = capsys.readouterr().err
        found = contents(folder)
        assert not [name for name in found if name.endswith(".tmp")], turn
        assert {name: found.get(name) for name in own} == own, turn
        assert zipfile.ZipFile(bundle).testzip() is None and len(bundle.read_bytes()) >= len(handed)
        if disk.left >= 0:
            break
        assert codes[-1] == 2 and said.count("\n") == 1, (turn, said)
        # all files of an audit, or those of the one before
        kept, refused = audit_files.kept(folder, run)
        assert [audit.name for audit in kept][:1] == ["audit-server"]
        moved = len(kept) == 2 and len(refused) == 1
        assert moved or (len(kept) == 3 and refused == []), turn
    assert codes[-1] == 0 and len(codes) > 10


def test_a_page_of_a_report_is_the_old_one_or_the_new_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder / "report.html"
    old = html_page.document("An earlier page", [])
    page.write_text(old)
    codes = []
    for turn in range(10):
        with pytest.MonkeyPatch.context() as patch:
            disk = Refusing(patch, errno.ENOSPC, turn)
            codes.append(main(["report", str(folder), "--html"]))
        if disk.left >= 0:
            break
        assert codes[-1] == 2 and page.read_text() == old
        assert capsys.readouterr().err.count("\n") == 1
        assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))
    assert codes[-1] == 0 and len(codes) > 3 and page.read_text().endswith("</html>\n")


def test_an_audit_of_this_version_is_not_that_of_another_run(audited: Path, tmp_path: Path) -> None:
    """Files that are moved to another run's folder are left, without a word."""
    folder = Path(shutil.copytree(audited, tmp_path / "run"))
    other = tmp_path / "other"
    assert main([*RUN, "--seed", "5", "--out", str(other)]) == 0
    for path in folder.glob("audit-*"):
        shutil.copy(path, other)
    assert audit_files.kept(other, open_run(other)) == ([], [])


def test_a_table_that_cannot_be_read_is_named(
    audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(audited, tmp_path / "run"))
    run = open_run(folder)
    whole = atomic_files.read

    def refusing(path: Path) -> bytes:
        if path.name == TABLE:
            raise RunFolderError(f"cannot read {path} (Permission denied)")
        return whole(path)

    monkeypatch.setattr(atomic_files, "read", refusing)
    kept, (sentence,) = audit_files.kept(folder, run)
    assert [audit.name for audit in kept] == ["audit-wire"] and TABLE in sentence
