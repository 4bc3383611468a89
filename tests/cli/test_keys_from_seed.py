"""Runs whose keys follow from the seed say so wherever they are shown; others have own secrets."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from cases import SMALL_FEDERATION

from securecluster.audits import run_audit as audit
from securecluster.cli.main import main

pytestmark = pytest.mark.usefixtures("own_secrets")
SMALL = [*SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--clip", "1"]
NOISY = [*SMALL, "--noise", "1"]
SAID = "whoever knows or guesses it undoes them, so that none of them protects anything"
SWITCHES = [([], False), (["--keys-from-seed"], True)]


def words(text: str) -> str:
    """Return a text as one line, without the lines of tables."""
    return re.sub(r"[│\s]+", " ", html.unescape(text))


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(("switch", "said"), SWITCHES)
def test_every_output_of_a_run_says_it(
    switch: list[str],
    said: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "attack_names", lambda: ["label-counts"])
    folder, archive = tmp_path / "run", tmp_path / "a.zip"
    assert main(["run", "fedavg", *NOISY, *switch, "--out", str(folder)]) == 0
    assert main(["report", str(folder), "--html"]) == 0
    assert main(["audit", str(folder), "--quiet", "--bundle", str(archive)]) == 0
    assert words(capsys.readouterr().out).count(SAID) == (2 if said else 0)
    for name in ("report.html", "audit-server.html"):
        assert (SAID in words((folder / name).read_text())) is said
    result = json.loads((folder / "result.json").read_text())
    privacy = result["privacy"]
    assert any(SAID in text for text in privacy["not_covered"]) is said
    assert privacy["reproducible_keys"] is said
    assert (result["seed"] is None) is said
    source = "config.json, learned.safetensors: the seed from" if said else "secret.key: the secret"
    assert any(text.startswith(source) for text in privacy["uncovered_files"])
    assert (folder / "secret.key").exists() is not said


@pytest.mark.parametrize(("switch", "said"), SWITCHES)
def test_a_sweep_says_it(
    switch: list[str], said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", "fedavg", *SMALL, "--noise", "1", "--seeds", "1", "--jobs", "1"]
    assert main([*command, *switch, "--out", str(tmp_path / "sweep")]) == 0
    assert (SAID in words(capsys.readouterr().out)) is said


@pytest.mark.parametrize(("switch", "said"), SWITCHES)
def test_a_comparison_says_it_and_each_of_its_runs_has_a_secret_of_its_own(
    switch: list[str], said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "both"
    assert main(["compare", "fedavg", "local", *NOISY, *switch, "--out", str(folder)]) == 0
    assert (SAID in words(capsys.readouterr().out)) is said
    assert json.loads((folder / "compare.json").read_text())["reproducible_keys"] is said
    secrets = {path.read_bytes() for path in folder.glob("*/secret.key")}
    assert len(secrets) == (0 if said else 2)
    digests = {json.loads(path.read_text())["data_digest"] for path in folder.glob("*/config.json")}
    assert len(digests) == 1
    assert main(["replay", str(folder / "fedavg")]) == 0
