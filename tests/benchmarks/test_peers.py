"""The comparison with other frameworks, as far as it can be tested without them: what the workers
read, and that they do equal work.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import export, make, net
from benchmarks.peers.process import PeerError, Worker, tagged, wait_until
from benchmarks.peers.run import ENVIRONMENTS, chosen, parsed, rows
from benchmarks.peers.turns import Measured
from benchmarks.peers.work import cpu, load, peak
from securecluster.errors import UsageError

HERE = Path(sys.executable)


@pytest.fixture(autouse=True)
def bundled_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECURECLUSTER_DATA", raising=False)


def worker(peer: str, work: Path) -> Worker:
    return Worker(peer, HERE, work, 1, "cpu", work.with_suffix(".log"))


def test_the_export_is_read_back(tmp_path: Path) -> None:
    written = export.export(tmp_path / "work.npz", "mlp", 4, 2, samples=25)
    read = load(str(tmp_path / "work.npz"))
    for name, value in vars(written).items():
        assert (
            np.array_equal(getattr(read, name), value)
            and np.asarray(value).dtype == np.asarray(getattr(read, name)).dtype
        )
    assert read.x.shape == (4, 25, 1, 28, 28) and read.images(0).max() <= 1
    assert (np.sort(read.order, axis=2) == np.arange(25)).all()
    assert (read.order[0] != read.order[1]).any() and (read.order[0, 0] != read.order[0, 1]).any()


def test_a_used_up_pool_is_dealt_again() -> None:
    dealt = export.dealt(10, 5, 4, export.Randomness(0))
    assert dealt.shape == (5, 4) and sorted(dealt.flatten()) == sorted([*range(10), *range(10)])


def test_networks_have_the_published_sizes() -> None:
    sizes = {name: sum(p.numel() for p in make().parameters()) for name, make in net.NETS.items()}
    assert sizes == {"mlp": 159_010, "cnn": 1_663_370}


@pytest.mark.exhaustive
def test_this_project_and_a_plain_loop_do_equal_work(tmp_path: Path) -> None:
    path = tmp_path / "work.npz"
    start = export.export(path, "mlp", 4, 2, samples=25).start
    ends = {}
    for peer in ("plain", "ours"):
        with worker(peer, path) as running:
            running.ready(60)
            answers = [running.ask("round", 60) for _ in range(2)]
            assert all(a["seconds"] > 0 and a["peak_rss_bytes"] > 1 << 20 for a in answers)
            assert 0.1 < running.ask("accuracy", 60)["accuracy"] <= 1
            running.ask(f"weights {tmp_path / peer}.npy", 60)
        ends[peer] = np.load(tmp_path / f"{peer}.npy")
    assert np.abs(ends["plain"] - start).max() > 1e-2
    assert np.abs(ends["plain"] - ends["ours"]).max() < 1e-4


@pytest.mark.exhaustive
def test_a_worker_that_fails_or_is_late_is_named_and_gone(tmp_path: Path) -> None:
    with (
        worker("plain", tmp_path / "missing.npz") as running,
        pytest.raises(PeerError, match=r"timed out after 0 s in getting ready"),
    ):
        running.ready(0)
    assert tagged(running._tag) == []
    with (
        worker("nobody", tmp_path / "missing.npz") as running,
        pytest.raises(PeerError, match=r"No module named peers\.work_nobody"),
    ):
        running.ready(60)


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    plan = chosen(
        parsed(["--peers", "ours", "--clients", "4", "--where", str(environment(tmp_path))]),
        tmp_path,
    )
    ours = Measured("ours", 2, seconds=[9.0, 2.0, 4.0, 3.0])
    lines = {line["peer"]: line for line in rows(plan, "mlp", 4, [ours], {})}
    assert set(lines) == set(ENVIRONMENTS)
    assert [lines["ours"][c] for c in ("first", "median", "min", "max", "times_ours")] == [
        "9.0000",
        "3.0000",
        "2.0000",
        "4.0000",
        "1.00",
    ]
    assert lines["ours"]["samples_per_second"] == "133"  # 4 × 100 / 3
    assert lines["pfl"]["status"] == "not run" and lines["pfl"]["median"] == ""


def environment(tmp_path: Path) -> Path:
    """A folder in which this project's environment looks complete."""
    (tmp_path / "securecluster").mkdir()
    (tmp_path / "securecluster" / "complete").write_text(
        "\n".join(make.NEEDS["securecluster"]) + "\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peers", "fedjax"], "peer"),
        (["--models", "resnet"], "model"),
        (["--rounds", "1"], "two rounds"),
        ([], "make it with"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        chosen(parsed([*arguments, "--where", str(tmp_path)]), tmp_path)


@pytest.mark.exhaustive
def test_a_failed_installation_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(make.NEEDS, "plain", ("--no-index", "no-such-package"))
    with pytest.raises(UsageError, match=r"installing plain failed: read .*plain\.log"):
        make.make("plain", tmp_path)
    assert "no-such-package" in (tmp_path / "plain.log").read_text()


def test_peak_memory_counts_children() -> None:
    alone = peak(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(60 << 20); input()"], stdin=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert wait_until(lambda: peak(child.pid) > 60 << 20, 30)
        assert peak(os.getpid()) > alone + (50 << 20)


def test_seconds_of_processors_are_those_of_the_process_and_its_children() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # in ticks of 10 ms; children of other tests have used little
    assert abs(cpu(os.getpid()) - used.ru_utime - used.ru_stime) < 0.5
    assert cpu(2**30) == 0.0
