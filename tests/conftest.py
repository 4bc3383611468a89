"""Shared by all tests: small federations, and no spinning threads on busy machines."""

from __future__ import annotations

import csv
import dataclasses
import os

# before torch loads: test processes on the same cores would fight
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from securecluster import Federation, LabelSwap
from securecluster.cli.main import main
from securecluster.data.locations import FOLDER
from securecluster.figures import curves
from securecluster.runtime.settings import Settings
from securecluster.studies import comparison_figures as comparison


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run full products of cases, and every seed"
    )
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="with --exhaustive: of the cases that it adds run one in N, always the same ones",
    )
    parser.addoption(
        "--part",
        type=int,
        default=0,
        metavar="K",
        help="with --every N: which one in N; N runs with K from 0 to N - 1 run every case once",
    )
    parser.addoption(
        "--write-seconds", action="store_true", help="run all usual cases, and write seconds.csv"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples Hypothesis draws for a property."""
    settings.register_profile("default", deadline=None, max_examples=25)
    settings.register_profile("exhaustive", deadline=None, max_examples=150)
    whole = config.getoption("exhaustive") and config.getoption("every") == 1
    settings.load_profile("exhaustive" if whole else "default")
    if config.getoption("write_seconds") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Seconds())


def _keys_from_seed(derived: bool) -> None:
    """Set the default of `Settings.keys_from_seed`.

    Args:
        derived: True has runs derive keys, masks and noise from their seeds, so that a test has the
            same numbers each time; False is the default that users have.
    """
    defaults = Settings.__init__.__defaults__
    names = [field.name for field in dataclasses.fields(Settings)]
    assert defaults is not None and names[-1] == "keys_from_seed"
    Settings.__init__.__defaults__ = (*defaults[:-1], derived)  # type: ignore[misc]
    Settings.__dataclass_fields__["keys_from_seed"].default = derived
    Settings.keys_from_seed = derived  # type: ignore[misc]


# now, before other modules make settings of their own
_keys_from_seed(True)


@pytest.fixture
def own_secrets() -> Iterator[None]:
    """Have each run of one test draw a secret of its own, as users' runs do."""
    _keys_from_seed(False)
    yield
    _keys_from_seed(True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --exhaustive asks for, or all but one in N of it."""
    # whoever names a file, or a test, has time for what is dear in it
    named = any(".py" in argument for argument in config.args) or config.getoption("keyword")
    left_out = _beyond_the_usual(items, {} if named else _dear(config))
    if config.getoption("exhaustive"):
        one_in, part = config.getoption("every"), config.getoption("part")
        # by its name: the same cases in each process, whatever else is collected
        left_out = {item for item in left_out if (zlib.crc32(item.nodeid.encode()) - part) % one_in}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _dear(config: pytest.Config) -> dict[str, float]:
    """Return processor seconds that a case of each dear test took when they were last measured."""
    if config.getoption("write_seconds") or not SECONDS.is_file():
        return {}
    with SECONDS.open() as file:
        return {row["test"]: max(float(row["seconds"]), 0.01) for row in csv.DictReader(file)}


def _beyond_the_usual(items: list[pytest.Item], dear: dict[str, float]) -> set[pytest.Item]:
    """Return the cases that --exhaustive alone runs."""
    usual = [item for item in items if not item.get_closest_marker("exhaustive")]
    cases: dict[str, list[pytest.Item]] = {}
    for item in usual:
        cases.setdefault(_function(item.nodeid), []).append(item)
    left_out = set(items) - set(usual)
    for function, some in cases.items():
        few, always = (some[0].get_closest_marker(name) for name in ("few", "always"))
        count = few.args[0] if few else len(some)
        if function in dear:
            # as many as `DEAR` is enough for
            count = min(count, len(some) if always else int(DEAR / dear[function]))
        left_out.update(_beyond_the_few(some, count))
    return left_out


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _beyond_the_few(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return the cases of a test without `count` evenly spaced ones."""
    if count >= len(cases):
        return []
    step = (len(cases) - 1) / max(count - 1, 1)
    kept = {round(step * k) for k in range(count)}
    return [case for position, case in enumerate(cases) if position not in kept]


# processor seconds: what a test may take by default, and what is listed in seconds.csv
DEAR, LISTED = 0.2, 0.3
SECONDS = Path(__file__).with_name("seconds.csv")
BEGUN = pytest.StashKey[float]()


def _processor_seconds() -> float:
    spent = os.times()  # of processes that have ended, too
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note when a test began."""
    item.stash[BEGUN] = _processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Have the report of a test tell its processor seconds."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("seconds", _processor_seconds() - item.stash[BEGUN]))


class _Seconds:
    """Writes which tests are dear, into the table by which later runs choose."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.cases[_function(report.nodeid)] += 1
            self.seconds[_function(report.nodeid)] += dict(report.user_properties)["seconds"]

    def pytest_sessionfinish(self) -> None:
        with SECONDS.open("w") as file:
            file.write("test,seconds\n")
            for test in sorted(self.cases):
                if self.seconds[test] >= LISTED:
                    file.write(f"{test},{self.seconds[test] / self.cases[test]:.2f}\n")


NAMED = ("SECURECLUSTER_PROTOCOLS", "SECURECLUSTER_SOURCES")
DRAWING = {module: module.draw for module in (comparison, curves)}


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Leave pictures out of run folders: drawing them takes longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        for module in DRAWING:
            patch.setattr(module, "draw", lambda *_: [])
        yield


@pytest.fixture(scope="module", autouse=True)
def no_named_parts() -> Iterator[None]:
    """Forget after a module which own parts its commands named for processes that they start."""
    before = {name: os.environ.get(name) for name in NAMED}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def with_pictures() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which runs and comparisons draw their pictures."""

    @contextmanager
    def drawing() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, draw in DRAWING.items():
                patch.setattr(module, "draw", draw)
            yield

    return drawing


@pytest.fixture
def pictures(with_pictures: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have runs and comparisons draw their pictures during one test."""
    with with_pictures():
        yield


@pytest.fixture(scope="session")
def small() -> Federation:
    """Six clients in two clusters, 40 training samples each."""
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=6, samples=40, seed=0
    )


@pytest.fixture
def refused_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., None]:
    """Check that a command in an empty folder is refused by a sentence, and leaves nothing."""
    monkeypatch.chdir(tmp_path)

    def check(sentence: str, *arguments: str) -> None:
        assert main([*arguments]) == 2
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1 and len(said) < 1000
        assert not list(tmp_path.iterdir())

    return check


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mobility folder of six persons with one leg of 60 positions each, every other one near the
    same of two places.
    """
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw, rows = np.random.default_rng(0), []
    for person in range(6):
        path = (
            np.array([2000 + 5000 * (person % 2), 3000])
            + np.cumsum(draw.normal(size=(60, 2)), axis=0) * 40
        )
        rows += [(f"p{person}", 10 * k, float(x), float(y), 0) for k, (x, y) in enumerate(path)]
    columns = dict(
        zip(("user_id", "t", "x", "y", "leg"), map(list, zip(*rows, strict=True)), strict=True)
    )
    folder = tmp_path / "data" / "most_mobility"
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "traces.parquet")
    pq.write_table(
        pa.table({"user_id": [f"p{k}" for k in range(6)], "slice": [str(k % 2) for k in range(6)]}),
        folder / "users.parquet",
    )
    monkeypatch.setenv(FOLDER, str(tmp_path / "data"))


@pytest.fixture
def brief_fit() -> Callable[..., Any]:
    """The fit of NSIM's pair network, of one small network that trains for a moment, whatever grid
    is asked for.
    """
    from securecluster.protocols.nsim.pair_network import PairNetworkConfig
    from securecluster.protocols.nsim.similarity_model import fit

    def brief(rows: Any, true: Any, draws: Any, grid: Any = None, networks: int = 1) -> Any:
        return fit(
            rows,
            true,
            draws,
            grid=(PairNetworkConfig(width=32, embedding=8, steps=100),),
            networks=1,
        )

    return brief
