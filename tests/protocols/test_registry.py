"""Protocols that packages outside this project declare."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from securecluster import protocols
from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.protocols import registry

MODULE = """
from typing import ClassVar

from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.fedavg import FedAvg


@protocol
class Outside(FedAvg):
    \"\"\"FedAvg under another name.\"\"\"

    extra: int = 3
    \"\"\"a number of no use\"\"\"

    name: ClassVar[str] = "outside"


class Misnamed(Outside):
    name = "other"


number = 3
"""
SMALL = ["--clients", "4", "--samples", "20", "--rounds", "2", "--epochs", "1"]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with good and bad declarations."""
    site = tmp_path / "site"
    info = site / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[securecluster.protocols]\n"
        "outside = outside_protocols:Outside\n"
        "gone = no_such_module:Gone\n"
        "absent = outside_protocols:Absent\n"
        "number = outside_protocols:number\n"
        "misnamed = outside_protocols:Misnamed\n"
    )
    (site / "outside_protocols.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    installed_packages.points.cache_clear()
    yield
    installed_packages.points.cache_clear()
    sys.modules.pop("outside_protocols", None)


def test_names_of_this_project_come_first_and_stay_its_own() -> None:
    names = registry.protocol_names()
    assert names[: len(registry.PROTOCOLS)] == list(registry.PROTOCOLS)
    assert "outside" in names and names.count("cfl") == 1


def test_the_table_has_every_class_that_the_package_exports() -> None:
    classes = [fact.class_name for fact in registry.PROTOCOLS.values()]
    others = {"ClusteringProtocol", "Settings"}
    assert sorted(classes) == sorted(set(protocols.__all__) - others)
    assert [registry.protocol_class(name).name for name in registry.PROTOCOLS] == [
        *registry.PROTOCOLS
    ]


def test_a_declaration_under_the_name_of_a_protocol_of_this_project_is_ignored_with_a_warning(
    tmp_path: Path,
) -> None:
    points = tmp_path / "site" / "outside-1.0.dist-info" / "entry_points.txt"
    points.write_text("[securecluster.protocols]\ncfl = outside_protocols:Outside\n")
    registry._warn_of_other_declaration.cache_clear()
    with pytest.warns(SecureClusterWarning, match="outside_protocols:Outside is declared under"):
        found = registry.protocol_class("cfl")
    registry._warn_of_other_declaration.cache_clear()
    assert found.__module__.startswith("securecluster.")
    assert registry.protocol_names().count("cfl") == 1


def test_a_declared_protocol_runs_resumes_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, compared = str(tmp_path / "run"), str(tmp_path / "compared")
    assert main(["run", "outside", *SMALL, "--extra", "5", "--out", run]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["protocol"] == "outside"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["protocol"]["extra"] == 5
    assert main(["resume", run]) == 0
    assert main(["compare", "outside", "fedavg", *SMALL, "--out", compared]) == 0
    rows = json.loads((tmp_path / "compared" / "compare.json").read_text())["protocols"]
    assert [row["protocol"] for row in rows] == ["outside", "fedavg"]
    assert rows[0]["accuracy"] == rows[1]["accuracy"], "it trains as FedAvg does"
    capsys.readouterr()
    assert main(["list"]) == 0
    assert "outside" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "declared as no_such_module:Gone, cannot be imported"),
        ("absent", "declared as outside_protocols:Absent, cannot be imported"),
        ("number", "is no ClusteringProtocol: name its class"),
        ("misnamed", "is called 'other' in its class"),
        ("outsid", "did you mean 'outside'"),
    ],
)
def test_a_declaration_that_leads_to_no_protocol_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        registry.protocol_class(name)
    assert "\n" not in str(caught.value)


def test_a_broken_declaration_does_not_stop_other_protocols(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "fedavg", "local", *SMALL, "--out", str(tmp_path / "c")]) == 0
    assert main(["run", "fedavg", *SMALL, "--out", str(tmp_path / "r")]) == 0
