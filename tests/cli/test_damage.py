"""Damage to any file that is read back is a refusal that names the file: bit flips, cuts, zeros,
missing files.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import SMALL_FEDERATION

from securecluster.cli.main import main
from securecluster.core import manifest
from securecluster.errors import SecureClusterError
from securecluster.folders import run_folder
from securecluster.protocols import CFL
from securecluster.runtime.run import Run

OPTIONS = [*SMALL_FEDERATION, "--epochs", "1", "--rounds", "5"]
RUN = ["run", "cfl", *OPTIONS, "--dropout", "0.1", "--fallback", "0.2", "--threads", "1", "--quiet"]
UNREAD = {".lock", *run_folder.PICTURES}


def _flip(data: bytes, draw: random.Random) -> bytes:
    position = draw.randrange(len(data))
    return (
        data[:position] + bytes([data[position] ^ (1 << draw.randrange(8))]) + data[position + 1 :]
    )


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "bit": _flip,
    "another bit": _flip,
    "last bit": lambda data, draw: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data, draw: data[: len(data) // 2],
    "empty": lambda data, draw: b"",
    "zeros": lambda data, draw: bytes(len(data)),
    "missing": lambda data, draw: None,
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its third checkpoint."""
    out, checkpoint = tmp_path_factory.mktemp("stopped") / "run", Run._checkpoint

    def stop(run: Run) -> None:
        checkpoint(run)
        if run._clock.number == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_checkpoint", stop)
        assert main([*RUN, "--out", str(out)]) == 130
    return out


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ended") / "run"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


def files_of(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in UNREAD]


def check_refusals(
    folder: Path, commands: list[list[str]], wanted: list[Path], capsys: pytest.CaptureFixture[str]
) -> int:
    """Damage each file in each way; every command must refuse in a sentence that names it. Returns
    how often.
    """
    draw, tried = random.Random(5), 0
    for path in wanted:
        whole = path.read_bytes()
        for name, damage in DAMAGES.items():
            damaged = damage(whole, draw) if whole else None
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            if damaged == whole:
                continue
            for command in commands:
                assert main([*command, str(folder)]) == 2, (path, name, command)
                said = capsys.readouterr()
                assert said.err.count("\n") == 1 and said.out == "", (path, name, said)
                assert path.name in said.err, (path, name, said.err)
                tried += 1
            path.write_bytes(whole)
    return tried


def test_a_stopped_run_goes_on_from_whole_files_alone(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    # frames are read by replay alone
    wanted = [p for p in files_of(folder) if not p.stem.isdigit()]
    names = {p.name for p in wanted}
    assert {
        "config.json", "history.jsonl", "ledger.jsonl", "index.jsonl", "clock", "loop-train",
        "clients", "network",
    } <= names  # fmt: skip
    assert check_refusals(folder, [["resume"]], wanted, capsys) >= 80


def test_a_stopped_run_that_nobody_damaged_goes_on(
    stopped: Path, ended: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    assert main(["resume", str(folder), "--quiet"]) == 0
    for name in (
        "models.safetensors",
        "server.safetensors",
        "history.jsonl",
        "ledger.jsonl",
        "transcript/index.jsonl",
    ):
        assert (folder / name).read_bytes() == (ended / name).read_bytes()


def test_an_ended_run_is_shown_and_replayed_from_whole_files_alone(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    frames = [p for p in files_of(folder) if p.stem.isdigit()]
    others = [p for p in files_of(folder) if not p.stem.isdigit()]
    assert {
        "result.json",
        "manifest.json",
        "learned.safetensors",
        "clients.safetensors",
        ".securecluster",
    } <= {p.name for p in others}
    assert check_refusals(folder, [["resume"], ["replay"]], others, capsys) >= 120
    assert check_refusals(folder, [["replay"]], frames[:3] + frames[-2:], capsys) >= 30


def test_a_protocol_is_loaded_from_whole_files_alone(ended: Path, tmp_path: Path) -> None:
    folder, draw = shutil.copytree(ended, tmp_path / "run"), random.Random(7)
    for name in ("learned", "clients", "server", "models"):
        path = folder / f"{name}.safetensors"
        whole = path.read_bytes()
        for damage in DAMAGES.values():
            damaged = damage(whole, draw)
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(SecureClusterError, match=path.name):
                CFL.load(folder)
            path.write_bytes(whole)
    assert CFL.load(folder).transcript_.mode == "full"
    index = folder / "transcript" / "index.jsonl"
    whole = index.read_bytes()
    # a transcript that lost its index would say that nobody saw anything
    for damage in DAMAGES.values():
        damaged = damage(whole, draw)
        index.unlink()
        if damaged is not None:
            index.write_bytes(damaged)
        with pytest.raises(SecureClusterError, match=r"index\.jsonl"):
            CFL.load(folder)
        index.write_bytes(whole)
    with pytest.raises(SecureClusterError, match="cannot read"):
        CFL.load("x" * 300)


def test_a_damaged_history_of_rounds_after_the_checkpoint_does_not_matter(
    stopped: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    with (folder / "history.jsonl").open("ab") as stream:
        stream.write(b"\xff\xfe{ torn")
    assert main(["resume", str(folder), "--quiet"]) == 0


def test_settings_cannot_be_edited_in_a_stopped_run(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    text = (folder / "config.json").read_text()
    for old, new in (
        ('"dropout": 0.1', '"dropout": 0.3'),
        ('"target": 0.99', '"target": 0.5'),
        ('"clients": 6', '"clients": "6"'),
    ):
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new))
        assert main(["resume", str(folder), "--quiet"]) == 2
        assert "config.json differs" in capsys.readouterr().err


def test_a_foreign_file_among_the_frames_is_named_or_left_alone(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (folder / "transcript" / "notes.safetensors").write_text("mine")
    assert main(["replay", str(folder)]) == 0
    capsys.readouterr()
    (folder / "transcript" / "009999.safetensors").write_text("surplus")
    assert main(["replay", str(folder)]) == 2
    assert "009999.safetensors belongs to no call" in capsys.readouterr().err


def reseal(folder: Path) -> None:
    """Make the digests fit again, as a forger would."""
    result = (folder / "result.json").read_bytes()
    run_folder.seal(folder, result)


@pytest.mark.parametrize("field", ["method", "up", "down", "lost", "round", "step"])
def test_replay_finds_an_index_that_was_forged_with_its_digests(
    field: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    index = folder / "transcript" / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    k = next(n for n, line in enumerate(lines) if line["method"] == "train" and len(line["to"]) > 1)
    wrong = {
        "method": "receive",
        "up": [1, *lines[k]["up"][1:]],
        "down": [9, *lines[k]["down"][1:]],
        "lost": [0],
    }
    lines[k][field] = wrong[field] if field in wrong else lines[k][field] + 1
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reseal(folder)
    assert main(["replay", str(folder)]) == 2
    assert f"line {k + 1} of" in capsys.readouterr().err


def test_a_run_without_a_transcript_does_not_say_that_nobody_saw_anything(tmp_path: Path) -> None:
    assert main([*RUN, "--transcript", "none", "--out", str(tmp_path / "r")]) == 0
    with pytest.raises(SecureClusterError, match="none"):
        list(CFL.load(tmp_path / "r").transcript_.seen_by("server"))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "field",
    [
        "labels", "bytes", "clusters", "names", "seed", "epsilon", "exact", "releases", "masks",
        "server_view",
    ],
)  # fmt: skip
def test_replay_finds_a_result_that_was_forged_with_its_digests(
    field: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    content = json.loads((folder / "result.json").read_text())
    if field == "labels":
        content["labels"][0] += 1
    elif field == "bytes":
        content["bytes"]["up"] -= 1
    elif field == "clusters":
        # what goes together is forged together: else the file is refused as it is read
        content["clusters"] += 1
        scores = content["metrics"][content["metric"]]
        of_metric = scores["per_cluster"], scores["baseline_per_cluster"]
        for items in (*of_metric, content["leaves"], content["fallback"]["nodes"]):
            items.append(items[0])
    elif field in content:
        others = {"names": ["x", *content["names"][1:]], "seed": 1}
        content[field] = others[field] if field in others else content[field] + 1
    elif field == "epsilon":
        content["privacy"] |= {"epsilon": 1.0, "epsilon_rdp": 1.0, "delta": 1e-5}
    else:
        content["privacy"][field] = []
    (folder / "result.json").write_text(json.dumps(content))
    reseal(folder)
    assert main(["replay", str(folder)]) == 2
    # a label beyond the clusters that have scores is refused as the file is read
    said = "is not what a run writes" if field == "labels" else "differs from the replay in its"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", '{"labels": 3}', '{"privacy": 3}'])
def test_a_forged_result_that_is_none_is_a_sentence(
    text: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (folder / "result.json").write_text(text)
    reseal(folder)
    assert main(["replay", str(folder)]) == 2
    assert "result.json" in capsys.readouterr().err


def test_replay_finds_a_ledger_that_was_forged_with_its_digests(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:-1]))
    reseal(folder)
    assert main(["replay", str(folder)]) == 2
    assert "ledger.jsonl differs from the replay" in capsys.readouterr().err


def test_a_manifest_checks_itself(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    manifest.write(tmp_path, ["a"])
    assert manifest.read(tmp_path) == {"a": manifest.Mark(3, manifest.digest(b"one"))}
    text = (tmp_path / "manifest.json").read_text()
    for wrong in (
        text.replace('"size": 3', '"size": 4'),
        text.replace('"a"', '"b"'),
        "[]",
        "{}",
        "",
        text.replace('"schema": 1', '"schema": 2'),
    ):
        (tmp_path / "manifest.json").write_text(wrong)
        with pytest.raises(SecureClusterError, match=r"manifest\.json differs"):
            manifest.read(tmp_path)
