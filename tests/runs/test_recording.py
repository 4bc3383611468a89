"""Recordings of Flower's apps: what is written is what was sent, and no message ends an app."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging.parties import SERVER
from securecluster.runs.recording import (
    EXCHANGES,
    HIDDEN,
    NOTHING_SENT,
    STEP,
    TRANSCRIPT,
    Recording,
    TrainingFacts,
    bytes_of,
    recorded,
)

NODES = [31, 17, 5]
Answer = Callable[[int, Message], RecordDict | Error | None]


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of Flower know the task that makes them, which Flower's own processes set."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Flower's grid, over function calls."""

    run = SimpleNamespace(run_id=1)

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.waiting: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return NODES

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        numbers = self.push_messages(messages)
        return self.pull_messages(numbers)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = f"m{id(message)}"
            message.metadata.__dict__["_message_id"] = number
            answer = self.answer(message.metadata.dst_node_id, message)
            if answer is not None:
                self.waiting[number] = Message(answer, reply_to=message)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        return [self.waiting.pop(number) for number in numbers if number in self.waiting]


def arrays(*values: Any) -> ArrayRecord:
    return ArrayRecord({f"w{k}": Array(np.asarray(v, np.float32)) for k, v in enumerate(values)})


def trained(node: int, message: Message) -> RecordDict:
    """A client whose update is its node's number in each coordinate."""
    metrics = MetricRecord({"num-examples": node, "loss": 0.5})
    if message.metadata.message_type == "evaluate":
        return RecordDict({"metrics": metrics})
    moved = [array.numpy() + node for array in message.content["arrays"].values()]
    return RecordDict({"arrays": arrays(*moved), "metrics": metrics})


def messages(*values: Any, kind: str = "train", number: int = 1) -> list[Message]:
    config = ConfigRecord({"server-round": number})
    return [
        Message(RecordDict({"arrays": arrays(*values), "config": config}), node, kind)
        for node in NODES
    ]


def test_an_app_with_a_strategy_of_flower_is_recorded_as_it_was(tmp_path: Path) -> None:
    results = []
    for wrap in (lambda grid: grid, lambda grid: recorded(grid, tmp_path / "x")):
        strategy = FedAvg(min_available_nodes=3)
        start = arrays([1.0, 2.0], [[3.0]])
        result = strategy.start(grid=wrap(Grid(trained)), initial_arrays=start, num_rounds=2)
        results.append(result.arrays.to_numpy_ndarrays())
    for plain, with_recording in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, with_recording)
    found = Recording.read(tmp_path / "x")
    assert [exchange["kind"] for exchange in found.exchanges] == ["train", "evaluate"] * 2
    assert [exchange["round"] for exchange in found.exchanges] == [1, 1, 2, 2]
    assert found.layout == (("w0", (2,)), ("w1", (1, 1)))
    assert found.nodes == sorted(NODES)
    seen = [m for m in found.transcript.seen_by(SERVER) if m.sender.kind == "client"]
    assert len(seen) == 6
    for message in seen:
        node = found.nodes[message.sender.index or 0]
        expected = [pytest.approx([node] * 3, abs=1e-5)]  # means of float32
        assert message.content.delta.values.tolist() == expected
        assert message.content.size.values.tolist() == [node]
    sent = [m for m in found.transcript.seen_by(SERVER) if m.sender == SERVER and m.round == 1]
    assert sent[0].content.model.values.tolist() == [[1.0, 2.0, 3.0]]
    assert found.exchanges[1]["metrics"]["0"] == {"num-examples": 5.0, "loss": 0.5}
    assert all(count > 0 for count in found.exchanges[0]["up"] + found.exchanges[0]["down"])


def summed_by_flower(grid: Any, rounds: int) -> None:
    """Run Flower's workflow of SecAgg+ over a grid."""
    context = Context(1, 1, {}, RecordDict(), {})
    start = ndarrays_to_parameters([np.array([1.0, 2.0], np.float32)])
    strategy = LegacyFedAvg(
        fraction_evaluate=0.0, min_available_clients=3, initial_parameters=start
    )
    legacy = LegacyContext(context, ServerConfig(num_rounds=rounds), strategy)
    DefaultWorkflow(SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(grid, legacy)


def test_flower_s_secure_aggregation_hides_updates_and_not_its_clients_numbers(
    tmp_path: Path,
) -> None:
    contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in NODES}

    def fit(message: Message, context: Context) -> Message:
        sent = recorddict_to_fitins(message.content, keep_input=True)
        moved = [array + 0.25 for array in parameters_to_ndarrays(sent.parameters)]
        status = Status(Code.OK, "")
        result = FitRes(status, ndarrays_to_parameters(moved), context.node_id, {"loss": 0.5})
        return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)

    def answer(node: int, message: Message) -> RecordDict:
        # the mod takes settings out of its message, and messages of one stage share them
        return secaggplus_mod(deepcopy(message), contexts[node], fit).content

    summed_by_flower(recorded(Grid(answer), tmp_path / "x"), rounds=2)
    found = Recording.read(tmp_path / "x")
    stages = [set(exchange["notes"].values()) for exchange in found.exchanges]
    assert stages == [{STEP}, {STEP}, {HIDDEN}, {STEP}] * 2
    assert [exchange["round"] for exchange in found.exchanges] == [1] * 4 + [2] * 4
    assert sum(exchange["updates"] for exchange in found.exchanges) == 0
    assert found.transcript.count == 0
    masked = found.exchanges[2]
    assert masked["metrics"]["0"] == {"num_examples": 5.0, "loss": 0.5}
    assert all(count > 0 for count in masked["up"] + found.exchanges[3]["down"])


@pytest.mark.parametrize("value", [[], "", b"", [""], ["ab", "c"], [True, False], [1, 2], 0.5, 3])
def test_bytes_are_counted_as_flower_counts_them_and_where_it_fails(value: Any) -> None:
    content = RecordDict({"config": ConfigRecord({"name": value})})
    counted = bytes_of(content)
    parts = value if isinstance(value, list) else [value]
    if "" in parts or value in ([], b""):
        assert counted == len("name")
    else:
        assert counted == content["config"].count_bytes()


def test_an_update_without_a_model_that_was_sent_is_said(tmp_path: Path) -> None:
    def answer(node: int, message: Message) -> RecordDict:
        return RecordDict({"arrays": arrays([1.0])})

    grid = recorded(Grid(answer), tmp_path / "x")
    config = ConfigRecord({"stage": "unmask"})
    grid.send_and_receive(
        [Message(RecordDict({"secaggplus_configs": config}), node, "train") for node in NODES]
    )
    (exchange,) = Recording.read(tmp_path / "x").exchanges
    assert set(exchange["notes"].values()) == {NOTHING_SENT}


def test_pushed_and_pulled_messages_are_recorded(tmp_path: Path) -> None:
    grid = recorded(Grid(trained), tmp_path / "x")
    numbers = grid.push_messages(messages([1.0]))
    assert len(grid.pull_messages(numbers)) == 3
    assert grid.get_node_ids() == NODES
    assert Recording.read(tmp_path / "x").exchanges[0]["updates"] == 3


def bad(kind: str) -> Any:
    broken = Array("float32", (1,), "numpy.ndarray", b"\x93NUMPY no array")
    return {
        "hostile": RecordDict({"arrays": ArrayRecord({"w0": broken})}),
        "no arrays": RecordDict({"metrics": MetricRecord({"loss": float("nan")})}),
        "shapes": RecordDict({"arrays": arrays([1.0, 2.0, 3.0])}),
        "infinite": RecordDict({"arrays": arrays([np.inf])}),
        "huge": RecordDict({"arrays": arrays(np.zeros(400))}),
        "secagg": RecordDict({"secure_aggregation": ConfigRecord({"masked": [b"1"]})}),
        "error": Error(code=7, reason="secret text"),
        "missing": None,
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hostile", "array 'w0' cannot be read"),
        ("no arrays", "without arrays"),
        ("shapes", "other shapes than those that were sent"),
        ("infinite", "not finite"),
        ("huge", "and 1,000 are stored"),
        ("secagg", "hidden: secure aggregation"),
        ("error", "error 7"),
        ("missing", "no reply"),
    ],
)
def test_a_message_that_cannot_be_read_is_said_in_a_sentence(
    tmp_path: Path, kind: str, said: str
) -> None:
    def answer(node: int, message: Message) -> Any:
        return bad(kind) if node == 17 else trained(node, message)

    grid = recorded(Grid(answer), tmp_path / "x", most_bytes=1000)
    for number in (1, 2):
        replies = grid.send_and_receive(messages([1.0], number=number), timeout=1.0)
        assert len(replies) == (2 if kind == "missing" else 3)
    found = Recording.read(tmp_path / "x")
    assert [exchange["updates"] for exchange in found.exchanges] == [2, 2]
    for exchange in found.exchanges:
        (note,) = exchange["notes"].values()
        assert said in note
        assert "secret text" not in json.dumps(exchange)
    (entry, _) = found.transcript.entries
    assert entry.lost == (found.nodes.index(17),)


def test_shapes_that_change_between_rounds_are_said_and_recorded(tmp_path: Path) -> None:
    grid = recorded(Grid(trained), tmp_path / "x")
    grid.send_and_receive(messages([1.0]))
    grid.send_and_receive(messages([1.0, 2.0], number=2))
    found = Recording.read(tmp_path / "x")
    assert "other names or shapes" in found.exchanges[1]["notes"]["all"]
    widths = [found.transcript.content(k)[1].reply.delta.values.shape for k in (0, 1)]
    assert widths == [(3, 1), (3, 2)]


def test_an_app_that_was_killed_while_it_wrote_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    facts = TrainingFacts(lr=0.1)
    recorded(Grid(trained), folder, facts).send_and_receive(messages([1.0]))
    for path in (folder / EXCHANGES, folder / TRANSCRIPT / "index.jsonl"):
        with path.open("a") as stream:
            stream.write('{"kind": "tr')
    assert len(Recording.read(folder).exchanges) == 1
    recorded(Grid(trained), folder, facts).send_and_receive(messages([2.0], number=2))
    found = Recording.read(folder)
    assert [exchange["round"] for exchange in found.exchanges] == [1, 2]
    models = [found.transcript.content(k)[0].query.model.row(0).tolist() for k in (0, 1)]
    assert models == [[1.0], [2.0]]


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    recorded(Grid(trained), folder, TrainingFacts(lr=0.1))
    with pytest.raises(UsageError, match="other facts"):
        recorded(Grid(trained), folder, TrainingFacts(lr=0.2))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        recorded(Grid(trained), tmp_path / "other")
    with pytest.raises(RunFolderError, match="no recording"):
        Recording.read(tmp_path / "other")
    (folder / "recording.json").write_text('{"schema": 1}')
    with pytest.raises(RunFolderError, match="damaged"):
        Recording.read(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"epochs": 1.5},
        {"batch_size": True},
        {"optimizer": "lbfgs"},
        {"momentum": 1.0},
        {"clip": "1"},
    ],
)
def test_facts_that_no_training_can_have_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"TrainingFacts: {name} is"):
        TrainingFacts(**wrong)
