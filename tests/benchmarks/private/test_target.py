"""Defaults under a target beside a grid: how they are judged."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.private import target


def row(options: str, seed: int, accuracy: float) -> dict[str, str]:
    return {
        "part": target.DEVELOPMENT,
        "setting": "fedavg",
        "options": options,
        "seed": str(seed),
        "accuracy": str(accuracy),
        "chosen": '{"clip": 1.0, "rounds": 10}' if options == target.DEFAULT else "{}",
        "status": "done",
    }


def judged(*rows: dict[str, str]) -> dict[str, Any]:
    (line,) = target.judged(target.DEVELOPMENT, rows)
    return line


def test_the_best_is_chosen_on_the_other_seed() -> None:
    runs = {target.DEFAULT: (0.5, 0.5), '{"rounds": 5}': (0.9, 0.1), '{"rounds": 40}': (0.1, 0.6)}
    line = judged(*(row(name, seed, runs[name][seed]) for name in runs for seed in (0, 1)))
    # by hindsight 5 rounds, whose mean is 0.5; on each seed the other one would be taken
    assert line["best_options"] == "--rounds 5"
    assert (line["best"], line["gap"]) == ("0.500", "-0.400")
    assert line["chosen"] == "--rounds 10"
    assert line["within"] and not line["lost"]


def test_a_seed_that_is_not_whole_does_not_count() -> None:
    rows = [row(target.DEFAULT, 0, 0.12), row('{"rounds": 5}', 0, 0.6)]
    line = judged(*rows, row(target.DEFAULT, 1, 0.9))
    assert (line["seeds"], line["accuracy"], line["gap"]) == (1, "0.120", "0.480")
    assert line["lost"] and not line["within"]


def test_the_grid_gives_everything_that_the_rule_chooses() -> None:
    settings = target.settings_of(target.HELD_OUT)
    assert len(settings) == len(target.OF_OTHERS) + target.DRAWS[target.HELD_OUT][1]
    for setting in settings.values():
        grid = target.grid_of(setting)
        assert len(grid) == len({str(options) for options in grid}) >= 3
        assert all({"model", "rounds"} <= options.keys() for options in grid)
    assert not settings.keys() & target.settings_of(target.DEVELOPMENT).keys() - {"hidden"}


def test_new_settings_have_clients_and_seeds_of_their_own() -> None:
    clients = {
        part: {(s.clients, s.shift) for s in target.settings_of(part).values() if s.clients < 21}
        for part in target.PARTS
    }
    assert len(target.settings_of(target.NEW)) == 15
    assert len(set(target.FIRST_SEED.values())) == len(target.FIRST_SEED) == len(target.PARTS) + 1
    assert not clients[target.NEW] & (clients[target.HELD_OUT] | clients[target.DEVELOPMENT])


@pytest.mark.parametrize("part", target.PARTS)
def test_each_setting_has_its_default_first(part: str) -> None:
    cells = target.cells(part, 1)
    defaults = [cell for cell in cells if cell["options"] == target.DEFAULT]
    assert [cell["setting"] for cell in defaults] == list(target.settings_of(part))


def test_a_miss_is_worse_where_the_pairs_of_its_seeds_say_so() -> None:
    def runs(options: str, *scores: float) -> list[dict[str, str]]:
        return [
            {**row(options, seed, score), "part": target.MISSES, "setting": "mrmtl 1"}
            for seed, score in enumerate(scores)
        ]

    rows = runs(target.DEFAULT, 0.5, 0.3, 0.4)
    # pairs differ by 0.10, 0.12 and 0.11, although the scores of one are as far apart as 0.2
    rows += runs('{"rounds": 10}', 0.6, 0.42, 0.51) + runs('{"rounds": 5}', 0.6, 0.1, 0.5)
    better, equal = target.compared(rows)
    assert (better["other"], better["lead"], better["seeds"]) == ("--rounds 10", "0.110", 3)
    # t of 0.975 with two degrees of freedom is 4.303, and the standard deviation 0.01
    assert float(better["low"]) == pytest.approx(0.11 - 4.303 * 0.01 / 3**0.5, abs=1e-3)
    assert better["worse"] and not equal["worse"]


def test_each_miss_is_of_the_new_settings_and_its_rival_of_the_grid() -> None:
    new = target.settings_of(target.NEW)
    for known in (target.MISSED, target.FORMER):
        for name, options in known.items():
            assert options in target.grid_of(new[name])
    assert {cell["setting"] for cell in target.cells(target.MISSES, 2)} == set(target.MISSED)
