"""The benchmark of noise: its grids, its table of efficient runs, and that it goes on."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import table
from benchmarks.private import noise
from securecluster.studies import sweep_figures as plots
from securecluster.studies import worker_pool
from securecluster.studies.sweep_plan import names_of, variants_of

TINY = noise.Part(
    ("fedavg", "local"),
    ("--epsilon", "8", "inf"),
    (
        *("--clients", "4", "--clusters", "2", "--samples", "40", "--model", "linear"),
        *("--rounds", "1", "--clip", "1"),
    ),
)


def test_the_default_grid_has_all_five_methods_and_each_mechanism() -> None:
    parts = [part for grid in noise.GRIDS["digits"].values() for part in grid.values()]
    names = set()
    mechanisms = set()
    for part in parts:
        names |= set(names_of(part.variants))
        for variant in variants_of(part.variants, SimpleNamespace()):
            mechanisms |= {f"{name}={value}" for name, value in variant.options.items()}
    assert {"cfl", "srfca", "flhc", "oneshot", "nsim"} <= names
    assert mechanisms >= {
        "placement=central", "placement=distributed", "gram_mechanism=naive", "compress=4bit",
        "sketch=64", "signature=gradient", "layer=last", "loss_clip=4.0",
    }  # fmt: skip


def line(variant: str, target: str, accuracy: str, marks: str) -> dict[str, str]:
    """Return a line of a summary with 100 bytes, and its marks by accuracy and by ARI."""
    by_accuracy, by_ari = marks.split()
    sent = {"up": "70.0", "down": "30.0", "noise": "1.5", "ari": "0.5"}
    row = {"protocol": variant.partition(":")[0], "variant": variant, "target_epsilon": target}
    return row | sent | {"accuracy": accuracy, "efficient": by_accuracy, "efficient_ari": by_ari}


def test_efficient_lines_are_sorted_by_their_target() -> None:
    rows = [
        line("cfl", "10.0", "0.6", "False True"),
        line("cfl", "inf", "0.9", "True False"),
        line("flhc", "2.0", "0.5", "False False"),
        line("flhc:sketch=64", "2.0", "0.4", "False False"),
        line("flhc", "10.0", "0.5", "False False"),
        line("local", "2.0", "0.6", "True False"),
        line("ifca", "2.0", "", "None None"),
    ]
    found = noise.pareto(rows)
    told = [(x["target_epsilon"], x["variant"], x["efficient_clustering"]) for x in found]
    assert told == [
        ("2.0", "flhc", True),  # of those that cluster; local training is better
        ("2.0", "local", False),
        ("10.0", "cfl", True),
        ("inf", "cfl", True),
    ]
    assert {x["bytes"] for x in found} == {100.0}


def test_the_picture_of_the_readme_has_the_rival_of_all_clusters_and_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    monkeypatch.setattr("securecluster.figures.figure.save", lambda _, figure: drawn.append(figure))
    noise.draw_methods()
    found, accuracy = drawn[0].axes
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    with_signatures = ["CFL with signatures", "FL+HC with signatures"]
    assert sorted(names) == [*with_signatures, "R-DPCFL", "SR-FCA", "fine-tuning", "signature"]
    for panel, curves in ((found, len(names) - 1), (accuracy, len(names))):
        assert len(panel.collections) >= curves, "a band for each"
    assert "ε" in accuracy.get_xlabel() and "δ" in accuracy.get_xlabel()
    sizes = {text.get_fontsize() for text in accuracy.get_xticklabels()}
    assert min(sizes) >= 12, "a phone shows half of it"


def test_pictures_of_pages_are_drawn_of_their_tables_and_are_linked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, Any] = {}

    def keep(path: Path, figure: Any) -> Path:
        drawn[path.name] = figure
        return path

    monkeypatch.setattr("securecluster.figures.figure.save", keep)
    noise.main(["--picture"])
    page = Path("docs/evidence/noise.md").read_text()
    assert len(drawn) == 3
    for name in drawn:
        assert f"benchmarks/results/{name})" in page
    there = {path.name for path in noise.RESULTS.glob("noise*.png")} | {"methods.png"}
    assert there == set(drawn), "no other picture lies there"
    (panel,) = drawn["noise_digits_updates_over_epsilon.png"].axes
    assert panel.get_xlabel() == "ε of a run for one client, at δ = 1e-05"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in a folder of their own, a tiny grid, and no pictures."""
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(noise, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "draw", lambda *_: [])
    monkeypatch.setattr(noise, "GRIDS", {"digits": {"digits": {"epsilon": TINY}}})
    return tmp_path


def _table(path: Path) -> list[dict[str, str]]:
    text = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(text))


def test_a_part_leaves_its_tables_and_is_not_run_twice(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--only", "epsilon", "--seeds", "1", "--jobs", "1", "--out", str(elsewhere)]
    noise.main(arguments)
    runs = _table(elsewhere / "noise_digits_epsilon_runs.csv")
    assert [(run["variant"], run["target_epsilon"]) for run in runs] == [
        ("fedavg", "8.0"),
        ("local", "8.0"),
        ("fedavg", "inf"),
        ("local", "inf"),
    ]
    efficient = _table(elsewhere / "noise_digits_epsilon_pareto.csv")
    # nothing sends less than local training
    assert [line["target_epsilon"] for line in efficient if line["variant"] == "local"][:1] == [
        "8.0"
    ]

    def no_more(_: Any, batches: Any, processes: int) -> list[Any]:
        assert list(batches) == []
        return []

    monkeypatch.setattr(worker_pool, "results", no_more)
    noise.main(arguments)
    assert _table(elsewhere / "noise_digits_epsilon_runs.csv") == runs


def test_positions_are_left_out_where_the_data_are_not_there(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(noise, "GRIDS", {"digits": {"mobility": {"positions": noise.POSITIONS}}})
    arguments = ["--only", "positions", "--out", str(elsewhere / "runs")]
    monkeypatch.setenv(noise.FOLDER, str(elsewhere))
    noise.main(arguments)
    monkeypatch.delenv(noise.FOLDER)
    noise.main(arguments)
    assert capsys.readouterr().out.count("positions is left out: SECURECLUSTER_DATA names no") == 2
    assert list(elsewhere.iterdir()) == []
