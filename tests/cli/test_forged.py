"""Folders from elsewhere, whose digests fit: whatever they hold is shown, or refused in a sentence
that names the file and the entry.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forging import MISSING, entries, forged

import securecluster
from securecluster.cli.main import main
from securecluster.core import manifest
from securecluster.errors import RunFolderError, SecureClusterError
from securecluster.folders import run_folder
from securecluster.reports.loading import load, open_transcript

SMALL = [
    "--threads", "1", "--quiet", "--samples", "12", "--model", "linear", "--clients", "4",
    "--epochs", "1", "--rounds", "2",
]  # fmt: skip
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES = {
    "missing": MISSING, "null": None, "list": [], "object": {}, "text": "x", "negative": -1,
    "huge": 10**400, "nested": DEEP, "NaN": float("nan"),
}  # fmt: skip
COMMANDS = [["report"], ["report", "--html"], ["resume"], ["replay"]]
ESCAPES = "\x1b]0;title\x07\x1b[31m \x9b1m \u202eRTL\u2066 \x00 \r\n second line"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a parameter tree, a mask and a client that did not reply."""
    out = tmp_path_factory.mktemp("ended") / "run"
    options = [*SMALL, "--fallback", "0.2", "--mask", "rotation", "--dropout", "0.1"]
    assert main(["run", "cfl", *options, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "comparison"
    assert main(["compare", "fedavg", "local", *SMALL, "--out", str(out)]) == 0
    return out


def write(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a run, and make all digests fit."""
    (folder / name).write_bytes(data)
    if name == "config.json":
        marker = manifest.encode({name: manifest.Mark.of(data)})
        (folder / ".securecluster").write_bytes(marker)
    if (folder / "manifest.json").is_file():
        run_folder.seal(folder, (folder / "result.json").read_bytes())


def write_json(folder: Path, name: str, content: Any) -> None:
    # whole numbers of any length, which json writes as they are
    write(folder, name, json.dumps(content).encode())


def check(folder: Path, name: str, commands: list[list[str]], capsys: Any) -> list[int]:
    """Check that each command ends well, or in one sentence that names the file."""
    codes = []
    for command, *options in commands:
        code = main([command, str(folder), *options])
        said = capsys.readouterr()
        codes.append(code)
        assert code in (0, 2), (command, said.err)
        if code == 2:
            assert said.err.count("\n") == 1, (command, said.err)
            # what the file says may be right, and not fit what there is
            others = ("in schema", "of your own", "on other data")
            assert name in said.err or any(text in said.err for text in others), said.err
    return codes


@pytest.mark.always
@pytest.mark.few(4)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", ["result.json", "config.json"])
def test_every_entry_of_a_run_is_read_with_its_type(
    name: str,
    kind: str,
    ended: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    content = json.loads((folder / name).read_text())
    exhaustive = request.config.getoption("exhaustive") and request.config.getoption("every") == 1
    some = list(entries(content))
    if not exhaustive:
        # each entry once in all kinds, and so that each kind meets each command
        some = some[list(VALUES).index(kind) :: len(VALUES)]
    refused = 0
    for number, path in enumerate(some):
        command = COMMANDS[number % len(COMMANDS)]
        write_json(folder, name, forged(content, path, VALUES[kind]))
        codes = check(folder, name, COMMANDS if exhaustive else [command], capsys)
        refused += codes.count(2)
    assert refused > len(some) / 4


@pytest.mark.parametrize("kind", VALUES)
def test_every_entry_of_a_comparison_is_read_with_its_type(
    kind: str, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(compared, tmp_path / "comparison")
    name = "config.json"
    content = json.loads((folder / name).read_text())
    for path in entries(content):
        write_json(folder, name, forged(content, path, VALUES[kind]))
        check(folder, name, [["resume"]], capsys)


@pytest.mark.parametrize(
    ("name", "path", "value", "sentence"),
    [
        ("result.json", ("privacy", "epsilon"), "x", "privacy.epsilon is not a number"),
        ("result.json", ("privacy", "fields", 0, "masked"), 1, "privacy.fields[0].masked is not"),
        ("result.json", ("metrics", "accuracy"), MISSING, "metrics.accuracy is missing"),
        ("result.json", ("clusters",), 10**9, "per_cluster has 1 items, not 1000000000"),
        ("result.json", ("bytes", "by_message", "train", "up"), True, "train.up is not a whole"),
        ("config.json", ("simulation", "clients"), "6", "simulation.clients is not a whole number"),
        ("config.json", ("settings", "threads"), 10**5, "threads is a whole number from 0 to"),
        ("config.json", ("protocol", "rounds"), [2], "protocol.rounds is not a whole number"),
        ("config.json", ("protocol", "rounds"), -2, "rounds"),
        ("config.json", ("protocol", "name"), "nope", "unknown protocol 'nope'"),
        ("config.json", ("protocol", "name"), MISSING, "protocol.name is not a text"),
        ("config.json", ("protocol", "nope"), 1, "protocol.nope is unknown"),
        ("config.json", ("network", "delta"), MISSING, "network.delta is not a number"),
        ("config.json", ("simulation", "samples"), 10**400, "simulation.samples is not a whole"),
        ("result.json", ("truth",), [], "truth has 0 items, not 4"),
        ("result.json", ("bytes", "up"), 10**400, "bytes.up is not a whole number"),
        ("config.json", ("data_digest",), MISSING, "data_digest is missing"),
        ("config.json", ("clients",), "0123", "clients is not a list"),
    ],
)
def test_the_sentence_names_file_and_entry(
    name: str,
    path: tuple[Any, ...],
    value: Any,
    sentence: str,
    ended: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    write_json(folder, name, forged(json.loads((folder / name).read_text()), path, value))
    assert main(["resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"{name} " in said and sentence in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("config.json", ("protocol", "relevance"), "x"),
        ("config.json", ("protocol", "aggregation"), "x"),
        ("config.json", ("protocol", "rounds"), -2),
    ],
)
def test_a_page_is_made_of_options_that_a_run_has(
    name: str,
    path: tuple[Any, ...],
    value: Any,
    ended: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    write_json(folder, name, forged(json.loads((folder / name).read_text()), path, value))
    assert check(folder, name, [["report", "--html"]], capsys) == [2]


def test_a_page_is_made_of_a_run_that_knew_no_pads(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    content = json.loads((folder / "result.json").read_text())
    for field in content["privacy"]["fields"]:
        del field["paired"]
    write_json(folder, "result.json", content)
    assert main(["report", str(folder), "--html"]) == 0


JUNK = {
    "empty": b"", "bytes": b"\x00\xff junk\n" * 10, "list": b"[]\n", "object": b"{}\n",
    "deep": b"[" * 100_000 + b"]" * 100_000 + b"\n",
}  # fmt: skip


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("junk", JUNK)
def test_every_file_of_a_run_may_hold_anything(
    junk: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    # files of runs that start from another run, or go on for longer
    absent = {"start.safetensors", "earlier.safetensors", "longer.json"}
    names = [*run_folder.READ_BACK - absent, "result.json", "transcript/index.jsonl"]
    opened: list[Callable[[Path], Any]] = [load, open_transcript]
    whole = {name: (folder / name).read_bytes() for name in names}
    for name in names:
        write(folder, name, JUNK[junk])
        for command in ("report", "resume", "replay"):
            assert main([command, str(folder)]) in (0, 2)
            assert capsys.readouterr().err.count("\n") <= 1
        for open_it in opened:
            try:
                open_it(folder)
            except SecureClusterError as error:
                assert "\n" not in str(error)
        write(folder, name, whole[name])


def with_escapes(value: Any, kept: tuple[str, ...]) -> Any:
    """Return a copy with escape sequences in every text, and in names that are a user's or ours.

    Args:
        value: of a JSON file.
        kept: entries that stay as they are.
    """
    if isinstance(value, str):
        return value + ESCAPES
    if isinstance(value, list):
        return [with_escapes(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    copy = {}
    for name, item in value.items():
        if name in ("dropped", "by_message"):
            item = {inner + ESCAPES: number for inner, number in item.items()}
        copy[name] = item if name in kept else with_escapes(item, kept)
    return copy


def check_printed(said: Any) -> str:
    """Check that a terminal can only show what was printed, and return it without spaces."""
    printed = said.out + said.err
    assert {c for c in printed if not c.isprintable()} <= {"\n"}
    return "".join(c for c in printed if c not in " │\n")


def test_no_text_of_a_result_takes_over_the_terminal(
    ended: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    content = json.loads((folder / "result.json").read_text())
    # of another metric there are no scores
    write_json(folder, "result.json", with_escapes(content, kept=("metric",)))
    for command in ("report", "resume"):
        assert main([command, str(folder)]) == 0
        printed = check_printed(capfd.readouterr())
        for text in ("cfl", "digits", "label-swap", "oncpu", "rotation", "nonoise", "key_offer"):
            assert text + r"\x1b]0;title\x07" in printed, text
        assert printed.count(r"\u202eRTL") > 20 and printed.count(r"\r\nsecondline") > 20


@pytest.mark.parametrize("name", ["result.json", "config.json", "history.jsonl"])
def test_no_sentence_about_a_file_takes_over_the_terminal(
    name: str, ended: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    text = (folder / name).read_text().splitlines()[0]
    content = json.loads((folder / name).read_text() if name.endswith("json") else text)
    tops = [path for path in entries(content) if len(path) < 3]
    for path in tops[::6]:
        write_json(folder, name, forged(content, path, ESCAPES))
        main(["report", str(folder)])
        check_printed(capfd.readouterr())
        write_json(folder, name, forged(content, path, {ESCAPES: ESCAPES}))
        main(["report", str(folder)])
        check_printed(capfd.readouterr())


def test_a_sentence_about_a_path_is_one_line_that_a_terminal_only_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for command in ("report", "resume", "replay"):
        assert main([command, str(tmp_path / ESCAPES.replace("\x00", ""))]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and r"\x1b]0;title\x07" in said
        assert all(c.isprintable() for c in said.rstrip("\n"))


def test_a_manifest_leads_to_no_file_elsewhere(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (tmp_path / "other").write_bytes(b"mine")
    for name in ("../other", str(tmp_path / "other"), "transcript/../../other"):
        marks = manifest.read(ended)
        marks[name] = manifest.Mark.of(b"mine")
        (folder / "manifest.json").write_bytes(manifest.encode(marks))
        with pytest.raises(RunFolderError, match=r"manifest\.json differs"):
            manifest.read(folder)


@pytest.fixture(scope="module")
def of_other_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose result another version wrote, which had no list of what queries brought."""
    folder = tmp_path_factory.mktemp("other") / "run"
    noise = ["--noise", "1", "--clip", "1"]
    options = [*SMALL, *noise, "--rounds", "1", "--transcript", "full", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(securecluster, "__version__", "0.2.0", raising=False)
        assert main(["run", "fedavg", *options]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["version"] == "0.2.0" and result["privacy"].pop("query_view")
    result["privacy"]["not_covered"] = ["other words"]
    write_json(folder, "result.json", result)
    return folder


def test_a_run_of_another_version_is_reported_and_replayed(
    of_other_version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["report", str(of_other_version)]) == 0
    assert "clients saw" not in capsys.readouterr().out
    assert main(["replay", str(of_other_version)]) == 0
    said = capsys.readouterr().out
    assert "the same 2 calls" in said and "are not verified: not_covered, query_view" in said


def test_an_epsilon_of_another_version_is_told_beside_this_one_s(
    of_other_version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(of_other_version, tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    result["privacy"]["epsilon"] = 0.5
    write_json(folder, "result.json", result)
    capsys.readouterr()
    assert main(["replay", str(folder)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"not verified: epsilon \(0\.5 there, \d[.\d]+ here\), not_covered", said)


def test_who_merely_says_that_another_version_wrote_a_result_changes_nothing(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    result["version"] = "0.2.0"
    result["privacy"]["not_covered"] = ["nothing"]
    write_json(folder, "result.json", result)
    capsys.readouterr()
    assert main(["replay", str(folder)]) == 2
    assert "in its privacy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), securecluster.__version__),  # which has the list, and other words
        (("labels", 0), 1),
        (("bytes", "up"), 1),
        (("privacy", "noise"), 3.0),
        (("privacy", "releases"), []),
        (("privacy", "fields"), []),
        (("privacy", "masks"), [{}]),
        (("privacy", "reproducible_keys"), False),
    ],
    ids=str,
)
def test_facts_that_another_version_recorded_must_follow_from_the_replay(
    path: tuple[Any, ...], value: object, of_other_version: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(of_other_version, tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    write_json(folder, "result.json", forged(result, path, value))
    assert main(["replay", str(folder)]) == 2
