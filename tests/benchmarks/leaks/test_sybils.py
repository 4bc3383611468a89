"""The table of Sybils: who they are, and that honest runs stand beside attacked ones."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

from benchmarks.leaks.sybils import HONEST, NONE, PROTOCOLS, cells, chosen, measure

RESULTS = Path("benchmarks/results/sybils.csv")


def test_every_protocol_has_honest_runs_for_each_seed() -> None:
    grid = cells("cpu", 2)
    honest = Counter(cell["protocol"] for cell in grid if cell["sybils"] == 0)
    assert set(honest) == set(PROTOCOLS) and min(honest.values()) >= 2
    assert {cell["behaviour"] for cell in grid if cell["sybils"] == 0} == {NONE}
    attacked = {cell["protocol"] for cell in grid if cell["sybils"]}
    assert attacked == set(PROTOCOLS) - set(HONEST)


def test_mimics_are_strangers_of_their_victim_and_honest_sybils_its_companions() -> None:
    truth = [0, 0, 0, 0, 1, 1, 1, 1]
    for seed in range(5):
        victim, companions = chosen(truth, "honest", 3, seed)
        assert {truth[i] for i in companions} == {truth[victim]} and victim not in companions
        again, strangers = chosen(truth, "copy", 3, seed)
        assert again == victim and truth[victim] not in {truth[i] for i in strangers}


def test_a_cell_measures_both_what_is_read_and_what_clients_score() -> None:
    attacked = measure(
        {"protocol": "flhc", "behaviour": "honest", "sybils": 3, "least": 2, "seed": 0}
    )
    assert attacked["isolated"] and attacked["error"] < 1e-5 and attacked["stopped"] == ""
    assert 0 < attacked["accuracy"] < 1 and attacked["alone"] == 0


def test_the_table_has_victims_that_are_read_and_honest_runs_in_which_nobody_is() -> None:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        next(file)
        rows = [row for row in csv.DictReader(file) if row["status"] == "done"]
    assert {row["seed"] for row in rows if row["sybils"] == "0"} >= {"0", "1", "2", "3", "4"}
    read = [row for row in rows if row["isolated"] == "True"]
    assert {"cfl", "flhc", "srfca"} <= {row["protocol"] for row in read}
    assert all(row["sybils"] != "0" and float(row["error"]) < 1e-4 for row in read)
