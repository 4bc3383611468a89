"""Files of audits: by adversary and budget, whole, and handed over together."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SMALL_FEDERATION

from securecluster import Federation
from securecluster.attacks import registry
from securecluster.attacks.base import TAPS, TRUE_CLUSTERS, Guess
from securecluster.attacks.label_counts import LabelCounts
from securecluster.audits import audit_files, audit_page, findings
from securecluster.audits import run_audit as audit
from securecluster.audits.run_audit import Adversary
from securecluster.cli.main import main
from securecluster.core import manifest
from securecluster.errors import UsageError
from securecluster.folders import run_folder
from securecluster.protocols import FedAvg, Settings
from securecluster.reports.finished_run import open_run

RUN = ["run", "fedavg", *SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
ENDINGS = ("html", "json", "manifest")
CHEAP = ["label-counts", "mean-image"]
SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audits") / "run"
    assert main([*RUN, "--mask", "none", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one's own, which is audited by few attacks."""
    monkeypatch.setattr(audit, "attack_names", lambda: CHEAP)
    return Path(shutil.copytree(made, tmp_path / "run"))


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("audit*"))


def test_an_audit_of_another_adversary_or_budget_leaves_the_first_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder)]) == 0
    assert written(folder) == [f"audit-server.{ending}" for ending in ENDINGS]
    first = {name: (folder / name).read_bytes() for name in written(folder)}
    archive = tmp_path / "all.zip"
    for options in (["--as", "wire"], ["--with", "client:3"], ["--budget", "20"]):
        assert main(["audit", str(folder), *options, "--bundle", str(archive)]) == 0
    assert {name: (folder / name).read_bytes() for name in first} == first
    names = ["server", "server-20s", "server-client-3", "wire"]
    files = [f"audit-{name}.{ending}" for name in names for ending in ENDINGS]
    files.append("audit-overview.html")
    assert written(folder) == sorted(files)
    assert run_folder.foreign(folder) == []
    files = [name for name in files if not name.endswith("manifest")]
    with zipfile.ZipFile(archive) as opened:
        assert set(opened.namelist()) == {*files, "report.html", "config.json", "result.json"}
        pages = [opened.read(name).decode() for name in files if name.endswith("html")]
    # true label counts are for the owner
    assert b"Labels of client" in first["audit-server.html"]
    assert all("Labels of client" not in page for page in pages)
    assert "replaced" not in capsys.readouterr().out


def test_the_same_audit_again_replaces_its_own_files_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--as", "wire"], [], ["--as", "server", "--budget", "180"]):
        assert main(["audit", str(folder), *options]) == 0
    printed = capsys.readouterr().out
    assert f"replaced {folder / 'audit-server.html'}" in printed
    assert "replaced" not in printed.partition("audit-wire.html")[0]
    assert len(written(folder)) == 7  # with the page of both


def test_all_audits_of_a_run_stand_side_by_side_on_one_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "all.zip"
    for options in (["--as", "client:3"], ["--as", "wire"], ["--bundle", str(archive)]):
        assert main(["audit", str(folder), *options]) == 0
    assert "audit-overview.html: all audits of this run" in capsys.readouterr().out
    own = (folder / "audit-overview.html").read_text()
    with zipfile.ZipFile(archive) as opened:
        handed_over = opened.read("audit-overview.html").decode()
        digested = opened.read("config.json") + opened.read("result.json")
    headings = ["The server (180 s)", "The wire (180 s)", "Client 3 (180 s)"]
    assert re.findall(r"<th>([^<]* s\))</th>", own) == headings
    assert "<th>Client #3 (180 s)</th>" in handed_over and "Client 3 " not in handed_over
    assert "This copy is to be handed over" in handed_over
    # only the server reads updates; and whoever has the bundle can say of which run it is
    counts = re.search(r"<tr><td[^>]*>How many samples of each label.*?</tr>", own)
    assert counts is not None
    assert counts.group().count(": visible") == 1
    assert counts.group().count("\N{EN DASH}</td>") == 1
    assert "1 of 2 attacks have no score for any of these adversaries." in own
    for text in (own, handed_over):
        assert hashlib.sha256(digested).hexdigest() in text
    # an audit that cannot be read does not end one that took minutes
    (folder / "audit-wire.json").write_text("[]")
    assert main(["audit", str(folder), "--quiet"]) == 0


def test_another_runs_audit_is_not_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = ["--out", str(tmp_path / "pages"), "--as", "wire"]
    assert main(["audit", str(folder), *pages]) == 0
    other = tmp_path / "other"
    assert main([*RUN, "--seed", "5", "--out", str(other)]) == 0
    capsys.readouterr()
    assert main(["audit", str(other), *pages]) == 2
    error = capsys.readouterr().err
    assert "is the audit of another run: give another --out" in error and error.count("\n") == 1


def test_audits_of_older_versions_stay_and_damaged_ones_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = {"audit.json": '{"schema": 1}', "audit.html": "Labels of client 0"}
    for name, text in older.items():
        (folder / name).write_text(text)
    archive = tmp_path / "all.zip"
    assert main(["audit", str(folder), "--as", "wire", "--bundle", str(archive)]) == 0
    assert "has an audit of an older version: it stays" in capsys.readouterr().err
    with zipfile.ZipFile(archive) as opened:
        assert not set(older) & set(opened.namelist())
    assert {name: (folder / name).read_text() for name in older} == older
    for text in ("", "[]", '{"schema": 1}'):
        (folder / "audit-wire.json").write_text(text)
        assert main(["audit", str(folder), "--as", "wire"]) == 2
        assert "is damaged, or an audit of another version" in capsys.readouterr().err


def test_file_names_are_plain_and_tell_adversaries_apart() -> None:
    names = ("a", "A", "../b", "a-client-b", "20s", "x" * 300, "é", "CON", "a b", "")
    adversaries = [Adversary((n,), (n,), "") for n in range(len(names))]
    adversaries += [Adversary((party,), (), "") for party in ("server", "wire", "authority")]
    adversaries += [Adversary(("server", n), (n,), "") for n in range(len(names))]
    everyone = tuple(range(len(names)))
    adversaries.append(Adversary(("server", *everyone), everyone, ""))
    stems = set()
    for adversary in adversaries:
        for budget in (180.0, 20.0, 0.5, 1e9, float("inf")):
            stem = audit_files.stem(adversary, names, budget)
            assert run_folder.AUDITS.fullmatch(f"{stem}.html") and len(stem) < 100
            stems.add(stem)
    assert len(stems) == 5 * len(adversaries)
    # who colludes with whom makes no difference
    pair = [Adversary((0, 4), (0, 4), ""), Adversary((4, 0), (4, 0), "")]
    assert len({audit_files.stem(adversary, names, 180.0) for adversary in pair}) == 1


def test_audits_at_once_leave_whole_files(tmp_path: Path) -> None:
    tables = [{"schema": 2, "numbers": [k] * 20_000} for k in range(4)]

    def write(table: dict[str, Any]) -> bool:
        for _ in range(20):
            audit_files.write(tmp_path, "audit-server", table, json.dumps(table))
            json.loads((tmp_path / "audit-server.json").read_text())
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, tables))
    assert written(tmp_path) == [f"audit-server.{ending}" for ending in ENDINGS]
    assert json.loads((tmp_path / "audit-server.json").read_text()) in tables
    # they are of one audit
    manifest.check(tmp_path, manifest.read(tmp_path, "audit-server.manifest"))


class Broken(LabelCounts):
    """An attack with a mistake in it."""

    name = "broken"

    def run(self, view: Any, knowledge: Any) -> Guess:
        """Fail with a message of several lines."""
        raise ZeroDivisionError("a mistake\nof \x1b[31mmine")


class Clustered(LabelCounts):
    """An attack on true clusters."""

    name = "clustered"
    requires = frozenset({TRUE_CLUSTERS})

    def run(self, view: Any, knowledge: Any) -> Guess:
        """Fail where it should not have been run."""
        raise AssertionError


@pytest.fixture
def own_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"broken": Broken(), "clustered": Clustered()}
    original = registry.attack_named
    for module in (audit, audit_page, findings):
        monkeypatch.setattr(module, "attack_named", lambda name: made.get(name) or original(name))


def test_an_attack_that_fails_is_named_in_one_line_and_shown_on_request(
    folder: Path,
    own_attacks: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # attacks that succeed are no failure
    assert main(["audit", str(folder), "--quiet", "--strict"]) == 0
    monkeypatch.setattr(audit, "attack_names", lambda: ["label-counts", "broken"])
    assert main(["audit", str(folder), "--quiet"]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("securecluster: the attack broken failed: ZeroDivisionError: a mistake")
    assert "\x1b" not in first and "--traceback" in second
    assert main(["audit", str(folder), "--traceback"]) == 3
    captured = capsys.readouterr()
    assert f'File "{__file__}", line ' in captured.err and "--traceback" not in captured.err
    assert "Failed: broken." in captured.out
    run = open_run(folder, "audit")
    results = audit.audited(run, audit.federation_of(run), attacks=["broken", "label-counts"])
    (failed,) = results.failed
    assert failed.attack == "broken" and f'File "{__file__}"' in failed.trace
    assert results.findings[audit.RUN][1].score is not None


def test_a_broken_protection_is_an_exit_code_where_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = dict.fromkeys(CHEAP, ("a mask",))
    monkeypatch.setattr(audit, "_claims", lambda *arguments: claims)
    for options, code in ((["--strict"], 4), ([], 0)):
        assert main(["audit", str(folder), "--quiet", *options]) == code


def federation_without_truth() -> Federation:
    draw = np.random.default_rng(0)
    clients = {}
    for name in ("north", "south", "east", "west"):
        x = draw.normal(size=(12, 4)).astype(np.float32)
        clients[name] = (x, draw.integers(0, 3, 12))
    return Federation.from_arrays(clients, classes=3, seed=0)


def test_a_fitted_object_and_a_folders_path_are_runs(tmp_path: Path, own_attacks: None) -> None:
    federation = federation_without_truth()
    path = tmp_path / "own"
    fitted = FedAvg(**SMALL).fit(federation, Settings(transcript="full"), folder=path)
    for run in (fitted, path, str(path), open_run(path, "audit")):
        results = audit.audited(run, federation, attacks=["label-counts", "clustered"])
        counts, clustered = results.findings[audit.RUN]
        assert counts.score is not None and results.adversary.text == "the server"
        needed = "not applicable: it needs true clusters, which this run does not have"
        assert clustered.reason == needed and not results.failed
    client = audit.audited(path, federation, "client:east", attacks=["label-counts"])
    assert client.adversary.clients == (2,)
    with pytest.raises(UsageError, match="was fitted in no folder"):
        audit.audited(FedAvg(**SMALL).fit(federation), federation)
    with pytest.raises(UsageError, match="an audit takes the folder of a run, or the object"):
        audit.audited(federation, federation)  # type: ignore[arg-type]


def test_what_needs_replies_before_protection_says_so_where_there_are_none(folder: Path) -> None:
    run = open_run(folder, "audit")
    federation = audit.federation_of(run)
    fitted = type(run.protocol)(**run.protocol.get_params())
    fitted.result_ = fitted.fitted_class.of_folder(fitted, folder)
    server = audit.adversary_of(run.names, "server")
    before = set(vars(fitted))
    finding = audit.finding_of(registry.attack_named("differencing"), fitted, federation, server)
    # the object may be handed on: it gets no client's data, and seeds it has anyway
    assert set(vars(fitted)) - before <= {"seeds_in_frames_"}
    assert finding.reason.startswith(f"not applicable: it needs {TAPS}")
