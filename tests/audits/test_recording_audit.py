"""Audits of recorded apps of Flower, whose clients here train in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from own_app import CLIENTS, FACTS, Net, data
from torch import nn

from securecluster import Federation, ForeignModel, load, open_transcript
from securecluster.attacks.scoring import BETTER
from securecluster.audits import audit_summary
from securecluster.audits.recording_audit import audit_recording, price
from securecluster.audits.run_audit import RUN, Finding
from securecluster.cli.main import main
from securecluster.errors import UsageError
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.recordings.recording import Recording, TrainingFacts, recorded, recorded_client

ATTACKS = ["linkage", "label-counts", "gradient-inversion-dlg", "dp-audit-two-worlds"]


class Clients:
    """A grid whose node 900 − 7·i trains on the i-th client's data."""

    def __init__(self, federation: Federation, mods: Any = None) -> None:
        self.partition = {900 - 7 * i: i for i in range(CLIENTS)}
        self.federation = federation
        self.mods = mods

    def get_node_ids(self) -> list[int]:
        return list(self.partition)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            config = {"partition-id": self.partition[node]}
            context: Any = SimpleNamespace(node_id=node, node_config=config)
            reply = self.mods(message, context, self.train) if self.mods else None
            replies.append(reply or self.train(message, context))
        return replies

    def train(self, message: Message, context: Any) -> Message:
        shard = self.federation.shards[context.node_config["partition-id"]]
        model = Net()
        arrays = message.content["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        x, y = torch.as_tensor(shard.x), torch.as_tensor(shard.y)
        loss = nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        moved = {}
        for (name, value), gradient in zip(model.named_parameters(), gradients, strict=True):
            moved[name] = Array((value - 0.1 * gradient).detach().numpy())
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        return Message(content, reply_to=message)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return data()


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of Flower know the task that makes them, which Flower's own processes set."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def app(folder: Path, federation: Federation, facts: TrainingFacts = FACTS) -> Clients:
    """Run FedAvg of Flower for two rounds, recorded at the server and at the clients."""
    clients = Clients(federation, recorded_client(folder / "clients", facts, "wards"))
    grid = recorded(clients, folder / "server", facts, app="wards")
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=2)
    return clients


def untrained(arrays: Any, x: Any, y: Any, call: Any) -> Any:
    """Return the arrays: an audit of a recording trains nothing."""
    return arrays


def scores(arrays: Any, x: Any) -> Any:
    """Return the logits of `Net`."""
    weights, bias = arrays
    return x.reshape(len(x), -1) @ weights.T + bias


def found(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.attack: finding for finding in findings}


def test_attacks_on_an_app_are_scored_by_the_clients_data(
    tmp_path: Path, federation: Federation
) -> None:
    clients = app(tmp_path, federation)
    for partitions in (clients.partition, tmp_path / "clients"):
        results = audit_recording(
            tmp_path / "server", federation, model=Net(), partitions=partitions, attacks=ATTACKS
        )
        by_name = found(results.findings[RUN])
        for name in ("linkage", "label-counts"):
            assert by_name[name].outcome == BETTER, by_name[name]
        # the step is of all samples, so the counts are nearly exact
        score = by_name["label-counts"].score
        assert score is not None and score.value < 0.1 < score.chance
        assert by_name["dp-audit-two-worlds"].reason.startswith("not applicable: it repeats")
    shuffled = {node: (i + 1) % CLIENTS for node, i in clients.partition.items()}
    results = audit_recording(
        tmp_path / "server", federation, model=Net(), partitions=shuffled, attacks=["label-counts"]
    )
    wrong = found(results.findings[RUN])["label-counts"].score
    assert wrong is not None and wrong.value > 0.2


def test_what_is_absent_is_said(tmp_path: Path, federation: Federation) -> None:
    app(tmp_path, federation, TrainingFacts(epochs=1))
    without = found(audit_recording(tmp_path / "server").findings[RUN])
    assert without["linkage"].outcome == BETTER
    assert without["label-counts"].reason == ("not applicable: needs the app's network (model)")
    with_model = audit_recording(tmp_path / "server", federation, model=Net())
    by_name = found(with_model.findings[RUN])
    assert by_name["label-counts"].reason == (
        "not applicable: needs the learning rate (TrainingFacts(lr=...))"
    )
    assert "the optimizer" in by_name["gradient-inversion-dlg"].reason
    alone = audit_recording(tmp_path / "server", federation, attacks=["membership-loss-threshold"])
    assert "Nothing was" in audit_summary.summary(alone, CLIENTS, "")
    assert by_name["membership-loss-threshold"].reason.startswith("ran, not scored: which node")
    assert with_model.failed == []


def test_a_client_has_its_own_view_alone(tmp_path: Path, federation: Federation) -> None:
    app(tmp_path, federation)
    recording = Recording.read(tmp_path / "server")
    node = recording.nodes[2]
    own = Recording.read(tmp_path / "clients" / str(node))
    assert own.nodes == [node]
    of_server = [recording.transcript.content(k)[1].reply.delta.values[2] for k in (0, 1)]
    of_client = [own.transcript.content(k)[1].reply.delta.values[0] for k in (0, 1)]
    for one, other in zip(of_server, of_client, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    seen = audit_recording(tmp_path / "server", adversary=f"client:{node}", attacks=["linkage"])
    assert "were not observed" in seen.findings[RUN][0].reason


def test_data_and_networks_of_others_are_refused(tmp_path: Path, federation: Federation) -> None:
    clients = app(tmp_path, federation)
    folder = tmp_path / "server"
    deeper = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 10))
    with pytest.raises(UsageError, match="give the app's network"):
        audit_recording(folder, federation, model=deeper)
    with pytest.raises(UsageError, match="same client's data"):
        audit_recording(folder, federation, partitions=dict.fromkeys(clients.partition, 0))
    with pytest.raises(UsageError, match="no recordings of clients"):
        audit_recording(folder, federation, partitions=tmp_path)
    recorded(clients, tmp_path / "empty")
    with pytest.raises(UsageError, match="let the app run first"):
        audit_recording(tmp_path / "empty")


def test_the_commands_name_the_app(
    tmp_path: Path, federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    app(tmp_path, federation)
    folder = str(tmp_path / "server")
    module = __name__
    given = ["--data", f"{module}:data", "--model", f"{module}:Net"]
    given += ["--clients", str(tmp_path / "clients"), "--attack", "label-counts"]
    assert main(["audit", folder, *given]) == 0
    shown = capsys.readouterr().out
    assert "label-counts" in shown and "no unprotected twin" in shown
    (page,) = (tmp_path / "server").glob("audit-server-*.html")
    assert "Audit of wards" in page.read_text()
    first = page.read_text().partition("<h2>In short</h2>")[2].partition("<h2>")[0]
    assert "could learn how many samples of each label a client holds" in first
    assert "wards, over Flower" in first
    assert f"--data {module}:data --model {module}:Net --clients" in page.read_text()
    (table,) = (tmp_path / "server").glob("audit-server-*.json")
    assert json.loads(table.read_text())["app"] == "wards"
    assert main(["report", folder]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"App: wards, over Flower, with {CLIENTS} clients." in shown
    assert main(["audit", folder, "--data", f"{module}:nothing"]) == 2
    assert main(["audit", folder, "--bundle", "x.zip"]) == 2


def test_a_recording_has_a_transcript_and_no_fitted_protocol(
    tmp_path: Path, federation: Federation
) -> None:
    app(tmp_path, federation)
    transcript = open_transcript(tmp_path / "server")
    assert transcript.count == Recording.read(tmp_path / "server").transcript.count > 0
    with pytest.raises(UsageError, match="holds no fitted protocol: use open_transcript"):
        load(tmp_path / "server")


def test_noise_of_a_mod_of_flower_leaves_little_to_attacks(
    tmp_path: Path, federation: Federation
) -> None:
    clients = Clients(federation, LocalDpMod(1.0, 1.0, 8.0, 1e-5))
    grid = recorded(clients, tmp_path / "server", FACTS)
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=2)
    results = audit_recording(
        tmp_path / "server",
        federation,
        model=Net(),
        partitions=clients.partition,
        attacks=["linkage", "label-counts"],
    )
    assert [finding.outcome == BETTER for finding in results.findings[RUN]] == [False, False]


def test_declared_noise_is_priced_where_its_parameters_are_known(
    tmp_path: Path, federation: Federation
) -> None:
    known = TrainingFacts(clip=1.0, noise=4.0, placement="local", delta=1e-5)
    app(tmp_path / "a", federation, known)
    app(tmp_path / "b", federation, TrainingFacts(noise=4.0))
    sentence = price(Recording.read(tmp_path / "a" / "server"))
    # two rounds of noise 4 are one of 4/√2 (Balle & Wang 2018, Theorem 8)
    exact = gaussian_epsilon(2**0.5 / 4.0, 1e-5)
    told = float(sentence.split("(")[1].split(",")[0])
    assert exact <= told * 1.005 and told <= 1.05 * exact
    assert "against the server over 2 rounds" in sentence
    unpriced = price(Recording.read(tmp_path / "b" / "server"))
    assert "unpriced: it takes clip, placement, delta" in unpriced


def test_a_model_of_another_framework_is_attacked_as_far_as_its_functions_go(
    tmp_path: Path, federation: Federation
) -> None:
    clients = app(tmp_path, federation)
    start = [np.zeros((10, 64), np.float32), np.zeros(10, np.float32)]
    by_outputs = ["membership-loss-threshold", "label-counts", "source-inference"]
    attacks = ["linkage", "gradient-inversion-dlg", *by_outputs]

    def tried(outputs: Any) -> dict[str, Finding]:
        results = audit_recording(
            tmp_path / "server",
            federation,
            model=ForeignModel(start, untrained, outputs),
            partitions=clients.partition,
            attacks=attacks,
        )
        return found(results.findings[RUN])

    silent = tried(None)
    for name in by_outputs:
        reason = silent[name].reason
        assert reason.startswith("not applicable: this needs outputs of the clients' models")
        assert reason.endswith("give outputs=, of (arrays, x)") and not silent[name].trace
    telling = tried(scores)
    for some in (silent, telling):
        assert some["linkage"].outcome == BETTER
        assert "through which no gradient is taken" in some["gradient-inversion-dlg"].reason
    # what torch's own network scores
    own = audit_recording(
        tmp_path / "server", federation, model=Net(), partitions=clients.partition,
        attacks=by_outputs,
    )  # fmt: skip
    for name, finding in found(own.findings[RUN]).items():
        mine = telling[name].score
        assert mine is not None and finding.score is not None, telling[name]
        assert mine.value == pytest.approx(finding.score.value, abs=1e-6)
    with pytest.raises(UsageError, match="give the app's network"):
        audit_recording(
            tmp_path / "server", federation, model=ForeignModel(start[:1], untrained),
            partitions=clients.partition,
        )  # fmt: skip
