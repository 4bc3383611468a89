"""A project of Flower: what `flower-init` writes, and what of it is the user's."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from securecluster.cli.main import main
from securecluster.data import Federation
from securecluster.data.facts import agree
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.derived import as_agreed, call_types
from securecluster.protocols import ClusteringProtocol
from securecluster.runtime.transport import Framed

SERVE_OPTIONS = {
    "clients", "seed", "out", "classes", "roster", "key", "server", "scores", "seconds", "joins",
}  # fmt: skip


def module_of(folder: Path, name: str) -> dict[str, object]:
    """Return the names of a module of the project."""
    names: dict[str, object] = {}
    exec(compile((folder / name).read_text(), name, "exec", dont_inherit=True), names)
    return names


def test_a_project_has_a_protocol_and_data_and_the_options_of_a_server(tmp_path: Path) -> None:
    project = tmp_path / "Two Hospitals"
    assert main(["flower-init", str(project)]) == 0
    package = project / "two_hospitals"
    task = module_of(package, "task.py")
    assert isinstance(task["protocol"], ClusteringProtocol)
    load = task["load"]
    assert callable(load)
    own = load(1, 3)
    assert isinstance(own, Federation) and len(own) == 1
    assert own.digest() != load(2, 3).digest()
    content = tomllib.loads((project / "pyproject.toml").read_text())
    app = content["tool"]["flwr"]["app"]
    assert app["config"].keys() == SERVE_OPTIONS
    assert Path(app["config"]["out"]) == (project / "runs" / "first").resolve()
    for path in app["components"].values():
        module, name = path.split(":")
        text = (project / f"{module.replace('.', '/')}.py").read_text()
        assert f"{name} = " in text


def test_clients_with_tables_of_text_agree_on_a_run_and_carry_it_out(tmp_path: Path) -> None:
    assert main(["flower-init", str(tmp_path / "hospitals"), "--table"]) == 0
    task: dict[str, Any] = module_of(tmp_path / "hospitals" / "hospitals", "task.py")
    protocol = task["protocol"]
    content = tomllib.loads((tmp_path / "hospitals" / "pyproject.toml").read_text())
    assert content["tool"]["flwr"]["app"]["config"]["classes"] == len(task["CLASSES"])
    policy = Policy(roster=False)
    nodes = [
        Node(protocol, task["load"](i, 3), tmp_path / f"node-{i}", number=i, policy=policy)
        for i in range(3)
    ]
    facts = agree([node.facts() for node in nodes], seed=0, classes=len(task["CLASSES"]))
    assert facts.shape == (6,)  # age, and a feature for each of the five texts
    proposal = Proposal.of(protocol, facts, "float32", None)
    for node in nodes:
        node.agree(proposal.packed())
    made = as_agreed(protocol, proposal.config)
    doors = {node.number: node.answer for node in nodes}
    transport = Framed(doors, lambda name: call_types(made, name)[1])
    assert len(ServerRun(made, proposal.config, transport).carried_out().history_) == 3


@pytest.mark.parametrize("kind", [[], ["--table"]])
def test_the_user_s_part_has_at_most_30_lines(kind: list[str], tmp_path: Path) -> None:
    main(["flower-init", str(tmp_path / "hospitals"), *kind])
    text = (tmp_path / "hospitals" / "hospitals" / "task.py").read_text()
    assert len(text.splitlines()) <= 30


def test_what_flower_ships_to_a_node_with_an_agent_imports_neither_torch_nor_this_package(
    tmp_path: Path,
) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    main(["flower-init", str(tmp_path / "hospitals")])
    code = (
        "import sys; import hospitals.client_app; "
        "print([name for name in ('torch', 'securecluster') if name in sys.modules])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path / "hospitals",
    )
    assert told.stdout.strip().endswith("[]")


def test_the_generated_modules_are_python(tmp_path: Path) -> None:
    main(["flower-init", str(tmp_path / "hospitals")])
    for path in (tmp_path / "hospitals").rglob("*.py"):
        ast.parse(path.read_text())


@pytest.mark.parametrize("name", ["1st", "class", "sys", "…"])
def test_a_folder_that_names_no_package_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flower-init", str(tmp_path / name)]) == 2
    assert "no name of a Python package" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_folder_in_use_and_a_missing_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    assert main(["flower-init", str(tmp_path / "used")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["flower-init", "one", "two"]) == 2
    assert "takes the project's folder" in capsys.readouterr().err
