"""The page docs/add-a-protocol.md: its code runs, and its template passes every check."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from securecluster import Federation, Rotation
from securecluster.app import registry
from securecluster.app.cli import main

PROTOCOL_TESTS = Path(__file__).parent / "protocols"
PAGE = Path(__file__).parent.parent / "docs" / "add-a-protocol.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
SMALL = ["--clients", "6", "--samples", "30", "--rounds", "2", "--epochs", "1", "--quiet"]


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's template, as a file of its own, in a package that declares it."""
    info = tmp_path / "mean-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mean\nVersion: 1.0\n")
    entry = re.search(r"^```toml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert entry is not None
    (info / "entry_points.txt").write_text(
        entry[1].replace("project.entry-points.", "").replace('"', "")
    )
    (tmp_path / "mean_clusters.py").write_text(BLOCKS[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._declared.cache_clear()
    import mean_clusters  # type: ignore[import-not-found]

    yield mean_clusters
    registry._declared.cache_clear()
    sys.modules.pop("mean_clusters")


def clients(seed: int, count: int = 8) -> Federation:
    """Clients of two kinds, upright digits and digits that are upside down."""
    return Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=count, samples=40, seed=seed
    )


def test_every_block_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ModuleType("page")  # type hints are looked up in the module of a class
    monkeypatch.setitem(sys.modules, "page", session)
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), session.__dict__)


def test_the_template_passes_every_check(
    template: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROTOCOL_TESTS))
    import conformance

    def make(**params: Any) -> Any:
        return template.MeanClusters(**{"model": "linear", "epochs": 1, "k": 2, **params})

    noise = {"clip": 1.0, "noise": 0.7}
    conformance.check_protocol(
        make, clients(0), clients(1, 6), "rotation", tmp_path / "runs", **noise
    )
    fitted = make(rounds=1, mask="rotation").fit(clients(0))
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


def test_the_template_runs_from_the_command_line(
    template: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "mean-clusters", *SMALL, "--k", "2", "--out", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["protocol"] == "mean-clusters"
    assert main(["resume", str(out)]) == 0
    assert main(["replay", str(out)]) == 0
    main(["run", "mean-clusters", "--help"])
    assert "cuts at the largest gap" in " ".join(capsys.readouterr().out.split())
