"""Defaults under a target beside a grid: how they are judged."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import target


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
    assert len(set(target.FIRST_SEED.values())) == len(target.PARTS)
    assert not clients[target.NEW] & (clients[target.HELD_OUT] | clients[target.DEVELOPMENT])


@pytest.mark.parametrize("part", target.PARTS)
def test_each_setting_has_its_default_first(part: str) -> None:
    cells = target.cells(part, 1)
    defaults = [cell for cell in cells if cell["options"] == target.DEFAULT]
    assert [cell["setting"] for cell in defaults] == list(target.settings_of(part))
