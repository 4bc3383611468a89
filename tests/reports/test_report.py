"""Lines and tables that people read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import exit_of

from securecluster.reports import report

LINE: dict[str, Any] = {
    "round": 7, "clusters": 4, "accuracy": 0.5, "ari": 1.0, "up": 1500, "down": 2500000,
}  # fmt: skip


def test_a_line_of_clustering_says_the_sizes() -> None:
    clustered = [list(range(5)), list(range(5, 8)), list(range(8, 20))]
    assert report.line_text(LINE | {"clustered": clustered}, 9) == (
        "round   7/9  clusters 4  accuracy 0.500  ARI 1.00  up 1.5 kB down 2.50 MB  "
        "[bold]clustered into 12 + 5 + 3[/bold]"
    )
    many = report.line_text(LINE | {"clustered": [[i] for i in range(100)]}, 9)
    assert "clustered into 1 + 1" in many and many.count(" + ") == 12 and "… (100 clusters)" in many
    assert "clustered" not in report.line_text(LINE | {"clustered": []}, 9)


def test_a_line_of_many_clusters_stays_short() -> None:
    split_tests = [{"mean_norm": 1.0, "max_norm": 2.0} for _ in range(50)]
    splits = [[c, [0, 1], [2]] for c in range(9)]
    text = report.line_text(LINE | {"split_tests": split_tests, "splits": splits}, 9)
    assert text.count("0.50") == 8 + 1 and text.count("split 3 into 2 + 1") == 4 and len(text) < 300


def _content(**more: Any) -> Any:
    accuracy = {"before": 0.5, "after": 0.75, "per_cluster": [0.7, 0.8]}
    metrics = {
        "ari": 1.0, "nmi": 1.0, "purity": 1.0, "exact": True, "accuracy": accuracy,
        "at_target": 0.25,
    }  # fmt: skip
    privacy = {
        "epsilon": 0.0, "server_view": [], "masks": [], "placement": "nothing",
        "neighbouring": "one", "not_covered": [],
    }  # fmt: skip
    head = {
        "protocol": "cfl", "data": "digits", "scenario": "iid", "clients": 4,
        "names": ["a", "b", "c", "d"], "clusters": 2, "labels": [0, 0, 1, 1],
    }  # fmt: skip
    sent = {"up": 1, "down": 1, "by_message": {}}
    found = {
        "truth": [0, 0, 1, 1],
        "metric": "accuracy",
        "unit": "",
        "metrics": metrics,
        "bytes": sent,
        "privacy": privacy,
        "dropped": {},
        "seconds": 1.0,
        "device": "cpu",
    }
    return {**head, **found, "target": 0.99, **more}


def test_the_closing_table_says_the_target_and_whose_model_a_cluster_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report.show(_content(), Path("here"))
    plain = capsys.readouterr().out
    assert "model of" not in plain and "share of clients at 0.99: 0.250" in re.sub(
        r"\s+", " ", plain
    )
    report.show(
        _content(leaves=[3, 4], fallback={"nodes": [3, 1], "losses": [{}, {}]}), Path("here")
    )
    assert re.search(
        r"│ 0 +│ a b +│ 0 +│ 0.700 +│ its own +│\n│ 1 +│ c d +│ 1 +│ 0.800 +│ node 1",
        capsys.readouterr().out,
    )


def test_what_went_between_servers_and_what_they_saw_is_told_where_there_is_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: dict[str, Any] = {
        "up": 3000,
        "down": 5,
        "servers": 0,
        "by_message": {"train": {"up": 3000, "down": 5}},
    }
    report.show(_content(bytes=sent), Path("here"))
    plain = capsys.readouterr().out
    assert re.search(r"│ train +│ 3,000 +│ +5 │\n│ all +│ 3,000 +│ +5 │", plain)
    assert "between" not in plain and "parameter server" not in plain
    sent = {
        "up": 3000,
        "down": 5,
        "servers": 1234,
        "by_message": {**sent["by_message"], "merge": {"up": 0, "down": 0, "servers": 1234}},
    }
    seen = {
        **_content()["privacy"],
        "server_view": ["relevance"],
        "unseen": ["updates"],
        "lps_view": ["updates of its clients"],
    }
    report.show(_content(bytes=sent, privacy=seen), Path("here"))
    told = capsys.readouterr().out
    assert re.search(
        r"│ train +│ 3,000 +│ +5 │ +0 │\n│ merge +│ +0 │ +0 │ +1,234 │\n│ all +│ 3,000 +│ +5 │ "
        r"+1,234 │",
        told,
    )
    assert re.search(
        r"│ saw +│ relevance +│\n│ a local parameter server saw +│ updates of its clients +│\n│ "
        r"did not see ",
        told,
    )


def test_long_lists_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    dropped = {f"client{i}": list(range(100)) for i in range(50)}
    report.show(_content(dropped=dropped, truth=None), Path("here"))
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "client11: 0 1" in said and "client12" not in said and "19 … (100); …" in said


@pytest.mark.exhaustive
@pytest.mark.usefixtures("pictures")
def test_a_run_with_a_fallback_says_whose_model_each_cluster_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        exit_of(
            "run cfl --pictures --rounds 12 --fallback 0.2 --threads 1", "--out", tmp_path / "r"
        )
        == 0
    )
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert len(result["fallback"]["nodes"]) == len(result["leaves"]) == result["clusters"] > 1
    assert len(set(result["leaves"])) == result["clusters"] and 0 not in result["leaves"], (
        "a leaf for each cluster, none the split root"
    )
    kept = [
        leaf == node
        for leaf, node in zip(result["leaves"], result["fallback"]["nodes"], strict=True)
    ]
    assert capsys.readouterr().out.count("its own") == sum(kept)
    assert (tmp_path / "r" / "tree.png").exists()


@pytest.mark.usefixtures("pictures")
def test_servers_are_told_apart(tmp_path: Path) -> None:
    small = [
        "--clients", "6", "--samples", "40", "--rounds", "2", "--tasks", "2", "--threads", "1",
        "--quiet", "--pictures",
    ]  # fmt: skip
    assert exit_of("run oneshot", *small, "--out", tmp_path / "r") == 0
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["scenario"] == "tasks" and result["bytes"]["servers"] > 0
    assert not any("delta" in text for text in result["privacy"]["server_view"]), (
        "updates go to local parameter servers"
    )
    assert any(
        text.startswith("delta of each of its clients in every ")
        for text in result["privacy"]["lps_view"]
    )
    for picture in ("relevance.png", "dendrogram.png"):
        assert (tmp_path / "r" / picture).read_bytes().startswith(b"\x89PNG")


# such a threshold warns, too
@pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")
@pytest.mark.parametrize(
    ("at", "said"),
    [("0.0001", r"λ 0\.0001 joins nobody: the nearest models are \S+ apart"), ("99", r"λ 99$")],
)
def test_the_threshold_is_told_and_when_it_joins_nobody(
    at: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--clients", "4", "--samples", "30", "--rounds", "1", "--local-rounds", "1",
        "--refine", "1", "--threads", "1",
    ]  # fmt: skip
    assert exit_of("run srfca", *small, "--threshold", at, "--out", tmp_path / "r") == 0
    line = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if "λ" in line and line.startswith("round")
    )
    assert re.search(said, line.strip())
