"""A file that a command writes where a user says replaces no file of somebody else."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from securecluster.audits import run_audit as audit
from securecluster.cli.main import main
from securecluster.core import outputs
from securecluster.errors import UsageError
from securecluster.privacy.masking.identities import Identity
from securecluster.protocols import conformance
from securecluster.studies import plan

SMALL = ["--clients", "4", "--samples", "20", "--rounds", "1", "--model", "linear", "--quiet"]
PLAN = ["plan", "fedavg", "--clients", "4"]
AUDIT = ["audit", "run", "--budget", "1", "--attack", "linkage", "--quiet"]
# a command, where it writes with {} for the name, and the file that it writes there
OUTPUTS = {
    "check": (["check", "fedavg", "--only", "bytes", "--quiet", "--json", "{}"], "out.json"),
    "plan": ([*PLAN, "--json", "{}"], "out.json"),
    "picture": ([*PLAN, "--picture", "{}"], "out.png"),
    "drawing": ([*PLAN, "--picture", "{}"], "out.svg"),
    "document": ([*PLAN, "--picture", "{}"], "out.pdf"),
    "bundle": (["report", "run", "--bundle", "{}"], "out.zip"),
    "audit's bundle": ([*AUDIT, "--bundle", "{}"], "out.zip"),
    "page": (["report", "run", "--html", "--out", "."], "report.html"),
    "audit's page": ([*AUDIT, "--out", "."], "*.html"),
    "audit's table": ([*AUDIT, "--out", "."], "*.json"),
}
# files of somebody else, with the right ending or not
FOREIGN = [
    b"\x89PNG\r\n\x1a\n a photo", b"%PDF-1.7 a thesis", b"<?xml version='1.0'?><svg/>",
    b'{"name": "a package"}', b"[1, 2]", b"[" * 100_000, b"a key of 32 bytes, and nothing else",
    b"<!DOCTYPE html><html>a diary</html>", b"PK\x03\x04 half an archive", b"\0",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "fedavg", *SMALL, "--out", "run"]) == 0
        assert main([*AUDIT, "--out", "audited"]) == 0
    return folder


@pytest.fixture(scope="module")
def outlook() -> plan.Outlook:
    return plan.plan(["fedavg"], epsilon=(8.0,), clients=4, samples=20, clusters=2, seeds=1)


@pytest.fixture
def place(
    home: Path, outlook: plan.Outlook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    (tmp_path / "run").symlink_to(home / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "plan", lambda *_, **__: outlook)
    return tmp_path


def of(name: str, home: Path) -> tuple[list[str], str]:
    """Return a command, and the file that it writes."""
    command, file = OUTPUTS[name]
    if "*" in file:  # which has a digest in its name
        (path,) = (home / "audited").glob(file)
        file = path.name
    return [word.format(file) for word in command], file


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_file_of_somebody_else_stays_and_an_earlier_one_is_replaced(
    name: str, home: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, file = of(name, home)
    path = place / file
    for content in FOREIGN:
        path.write_bytes(content)
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert file in said and said.count("\n") == 1
        assert path.read_bytes() == content
    path.unlink()
    for kind in ("link", "folder"):
        path.symlink_to(place / "nothing") if kind == "link" else path.mkdir()
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
        path.unlink() if kind == "link" else path.rmdir()
    for _ in range(2):
        assert main(arguments) == 0
        assert path.stat().st_size > 100


def test_nothing_is_computed_before_it_is_known_where_it_goes(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: object, **__: object) -> None:
        raise AssertionError("minutes of work")

    monkeypatch.setattr(plan, "plan", computed)
    monkeypatch.setattr(audit, "audited", computed)
    monkeypatch.setattr(conformance, "check", computed)
    for name in ("check", "plan", "picture", "audit's bundle", "audit's page", "audit's table"):
        arguments, file = of(name, home)
        (place / file).write_bytes(b"mine")
        assert main(arguments) == 2


def test_kinds_of_files_are_told_apart_by_their_content(tmp_path: Path) -> None:
    of_plans = outputs.json_with(("clients", "forecasts"))
    assert of_plans(json.dumps({"clients": 1, "forecasts": [], "more": 2}).encode())
    assert not of_plans(json.dumps({"clients": 1}).encode())
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("config.json", "{}")
    assert outputs.zip_with(["config.json"])(archive.read_bytes())
    assert not outputs.zip_with(["config.json", "result.json"])(archive.read_bytes())
    assert not outputs.is_picture(b"a page about securecluster")


def test_an_identity_takes_the_place_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.generate()
    first.save(path)
    with pytest.raises(UsageError, match="a lost key cannot be made again: give a new path"):
        Identity.generate().save(path)
    assert Identity.load(path).public == first.public
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="give a new path"):
        first.save(tmp_path / "link")
    assert os.readlink(tmp_path / "link") == str(tmp_path / "nothing")
