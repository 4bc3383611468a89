"""A server's own run in a folder: what it has, what reads it, and what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation, Settings, load
from securecluster.cli.main import main
from securecluster.core.serialization import pack
from securecluster.data.facts import agree
from securecluster.errors import PolicyError, RunFolderError, UsageError
from securecluster.figures import curves
from securecluster.folders import run_folder
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal, accepted
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import as_agreed, call_types
from securecluster.protocols import CFL, IFCA, FedAvg
from securecluster.protocols.common.options.target_defaults import chosen_for
from securecluster.runtime.transport import Framed

CLIENTS = 4
SMALL: dict[str, Any] = {"rounds": 3, "epochs": 1, "model": "linear"}
METHODS = {
    "cfl": CFL(**SMALL),
    "cfl, secagg": CFL(**SMALL, sketch=64, aggregation="secagg"),
    "fedavg, central noise": FedAvg(**SMALL, clip=1.0, noise=1.0, placement="central"),
    "ifca, secagg": IFCA(**SMALL, k=2, starts=1, aggregation="secagg"),
}
KEY = bytes(range(32))


def nodes_of(made: Any, federation: Federation, folder: Path) -> list[Node]:
    policy = Policy(roster=False)
    return [
        Node(made, federation.select([i]), folder / f"node-{i}", number=i, policy=policy)
        for i in range(CLIENTS)
    ]


def server_of(
    made: Any, nodes: list[Node], folder: Path | None = None, **options: Any
) -> ServerRun:
    """Return the server's run over some nodes, which have agreed to it."""
    facts = agree([node.facts() for node in nodes], seed=0, classes=10)
    proposal = Proposal.of(made, facts, "float32", None, folder)
    for node in nodes:
        node.agree(proposal.packed())
    made = as_agreed(made, proposal.config)
    doors: dict[int, Callable[[bytes], bytes]] = {node.number: node.answer for node in nodes}
    check = Deployment(made, proposal.config).reply_check()
    transport = Framed(doors, lambda name: call_types(made, name)[1], strict=False, check=check)
    return ServerRun(made, proposal.config, transport, **options)


def key_of(name: str) -> bytes | None:
    return KEY if "central" in name else None


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_its_folder_is_read_as_any_run_s_and_has_nothing_of_clients(
    name: str, federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = METHODS[name]
    folder = tmp_path / "server"
    nodes = nodes_of(made, federation, tmp_path)
    fitted = server_of(made, nodes, key=key_of(name)).carried_out(folder)
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert "clients.safetensors" not in names
    assert ("secret.key" in names) == (key_of(name) is not None)
    content = run_folder.result_of(folder)
    assert content["observer"] is False and content["truth"] is None
    for command in ("report", "replay"):
        assert main([command, str(folder)]) == 0
    assert main(["report", str(folder), "--html"]) == 0
    told = capsys.readouterr().out
    assert "nan" not in told.lower()
    loaded = load(folder)
    assert pack(loaded.state_) == pack(fitted.state_)
    assert np.isnan(loaded.scores_).all()
    assert loaded.labels_.tolist() == fitted.labels_.tolist()
    assert loaded.ledger_.events == fitted.ledger_.events
    for ask in (
        lambda: loaded.model_of("0"),
        lambda: loaded.secrets_of("0"),
        lambda: loaded.module_of(cluster=0),
        lambda: loaded.predict_samples("0", federation.shards[0].x),
        lambda: loaded.export(tmp_path / "exported"),
    ):
        with pytest.raises(UsageError, match="a server's result, whose clients are nodes"):
            ask()
    with pytest.raises(UsageError, match="a server's result"):
        loaded.join(federation)


def test_nodes_derive_what_a_target_chooses_by_themselves(
    federation: Federation, tmp_path: Path
) -> None:
    made = FedAvg(target_epsilon=50.0, epochs=1)
    nodes = nodes_of(made, federation, tmp_path)
    fitted = server_of(made, nodes).carried_out(tmp_path / "server")
    chosen = chosen_for(made, federation.facts)
    assert chosen.keys() == {"clip", "aggregation", "model", "rounds"}
    assert len(fitted.history_) == chosen["rounds"]
    content = run_folder.result_of(tmp_path / "server")
    assert content["chosen"] == chosen
    assert fitted.ledger_.price().epsilon <= 50.0
    assert main(["replay", str(tmp_path / "server")]) == 0
    # a server that was given another number of rounds has none of its own choosing
    given = FedAvg(target_epsilon=50.0, epochs=1, rounds=30)
    other = Proposal.of(given, federation.facts, "float32", None)
    with pytest.raises(PolicyError, match="rounds"):
        accepted(other, nodes[0].method, *_own(nodes[0], federation))


def _own(node: Node, federation: Federation) -> tuple[Any, ...]:
    """Return what else a node needs to accept a proposal."""
    facts = federation.select([node.number]).facts_of(0, samples=True, classes=True)
    return facts, node.number, node.policy, None


def test_what_the_server_does_not_know_is_unknown_in_its_result(
    federation: Federation, tmp_path: Path
) -> None:
    made = METHODS["ifca, secagg"]
    server_of(made, nodes_of(made, federation, tmp_path)).carried_out(tmp_path / "server")
    content = run_folder.result_of(tmp_path / "server")
    assert (content["labels"], content["clusters"]) == ([-1] * CLIENTS, 0)


def test_a_run_without_a_folder_is_the_run_in_this_process(
    federation: Federation, tmp_path: Path
) -> None:
    made = METHODS["cfl"]
    fitted = server_of(made, nodes_of(made, federation, tmp_path)).carried_out()
    whole = made.fit(federation, Settings(threads=1))
    assert fitted.labels_.tolist() == whole.labels_.tolist()
    assert [line["up"] for line in fitted.history_] == [line["up"] for line in whole.history_]
    assert fitted.verb_outcomes()


class StoppedError(Exception):
    """A server that ends after a round."""


def test_a_server_that_was_stopped_goes_on_and_one_that_has_ended_does_not(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = METHODS["cfl, secagg"]
    nodes = nodes_of(made, federation, tmp_path)
    folder = tmp_path / "server"

    def stop(line: Any) -> None:
        if line["round"] == 2:
            assert main(["report", str(folder)]) == 2
            assert "under way in another process, and has ended 2 of" in capsys.readouterr().err
            raise StoppedError

    with pytest.raises(StoppedError):
        server_of(made, nodes, folder).carried_out(folder, stop)
    for command in ("resume", "report"):
        assert main([command, str(folder)]) == 2
        told = capsys.readouterr().err
        assert "over Flower by flwr run with the same out" in told and told.count("\n") == 1
    with pytest.raises(RunFolderError, match="another configuration"):
        server_of(made, nodes).carried_out(folder)  # as another run, of its own number
    fitted = server_of(made, nodes, folder).carried_out(folder)
    assert len(fitted.history_) == 3
    with pytest.raises(RunFolderError, match="has ended"):
        server_of(made, nodes, folder)
    other = METHODS["cfl"]
    with pytest.raises(RunFolderError, match="another configuration"):
        server_of(other, nodes_of(other, federation, tmp_path)).carried_out(folder)


def test_an_audit_needs_the_clients_data_and_works_with_it(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import securecluster

    made = METHODS["cfl"]
    folder = tmp_path / "server"
    server_of(made, nodes_of(made, federation, tmp_path)).carried_out(folder)
    assert main(["audit", str(folder), "--as", "server"]) == 2
    assert "securecluster.audit(" in capsys.readouterr().err
    results = securecluster.audit(folder, federation, attacks=["label-distributions", "linkage"])
    assert results


@pytest.mark.always
@pytest.mark.usefixtures("own_secrets")
def test_an_audit_needs_no_keys_of_clients(federation: Federation, tmp_path: Path) -> None:
    import securecluster

    made = METHODS["cfl"]
    folder = tmp_path / "server"
    server_of(made, nodes_of(made, federation, tmp_path)).carried_out(folder)
    assert not list(folder.rglob("secret.key"))
    results = securecluster.audit(folder, federation, attacks=["linkage", "label-counts"])
    assert [finding.failed for finding in results.findings["run"]] == [False, False]
    assert results.findings["run"][0].score is not None
    assert any("keys are with the clients" in note for note in results.notes)
    with pytest.raises(RunFolderError, match="cannot be repeated"):
        securecluster.audit(folder, federation, adversary="authority", attacks=["linkage"])


@pytest.mark.usefixtures("pictures")
def test_scores_that_clients_tell_are_in_the_result_and_marked(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = METHODS["fedavg, central noise"]
    folder = tmp_path / "server"
    told = [0.5, float("nan"), 1.0, 0.75]
    nodes = nodes_of(made, federation, tmp_path)
    server_of(made, nodes, key=KEY, scores=lambda: told).carried_out(folder)
    content = run_folder.result_of(folder)
    metrics: Any = content["metrics"]
    assert (metrics["accuracy"]["after"], content["observer"]) == (0.75, False)
    assert metrics["at_target"] == pytest.approx(1 / 3)
    np.testing.assert_array_equal(load(folder).scores_, told)
    assert main(["report", str(folder)]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "accuracy before clusters –, after 0.750" in out
    assert "accuracy that clients told of their own test samples" in out
    fitted = load(folder)
    # scores of the end alone have no curve
    assert curves.draw(folder, content, fitted.history_, fitted.state_) == []
    assert not (folder / "clients.safetensors").exists()
