"""Recordings of Flower's apps: what is written is what was sent, and no message ends an app."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flower_grid import NODES, Grid, arrays, messages, trained
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

from securecluster.audits.recording_audit import audit_recording
from securecluster.audits.recording_report import price, sampling
from securecluster.cli.main import main
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.messaging.parties import SERVER
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.recordings import recording
from securecluster.recordings.recording import (
    EXCHANGES,
    HIDDEN,
    NOTHING_SENT,
    STEP,
    TRANSCRIPT,
    Recording,
    TrainingFacts,
    bytes_of,
    partitions_in,
    recorded,
    recorded_client,
)


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of Flower know the task that makes them, which Flower's own processes set."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


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

    # what the example fl-dp-sa of Flower declares
    facts = TrainingFacts(clip=10.0, noise=0.2, placement="central", delta=1e-5, sampled_clients=3)
    summed_by_flower(recorded(Grid(answer), tmp_path / "x", facts), rounds=3)
    found = Recording.read(tmp_path / "x")
    stages = [set(exchange["notes"].values()) for exchange in found.exchanges]
    assert stages == [{STEP}, {STEP}, {HIDDEN}, {STEP}] * 3
    assert [exchange["round"] for exchange in found.exchanges] == [1] * 4 + [2] * 4 + [3] * 4
    # three Gaussian mechanisms, and not one for each message
    exact = gaussian_epsilon(3**0.5 / 0.2, 1e-5)
    told = float(price(found).split("(")[1].split(",")[0])
    assert exact <= told * 1.005 and told == 73.6 and "over 3 rounds," in price(found)
    assert sampling(found) == ""
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


# the app's rounds

Step = tuple[dict[str, Any], int]  # what is pushed, and the round that it is of


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([({"number": k}, k) for k in (0, 1, 2)], id="numbers, from 0"),
        pytest.param([({"number": k}, k) for k in (5, 5, 2, 5)], id="numbers in any order"),
        pytest.param(
            [({"group": name}, k) for name, k in [("warm-up", 1), ("b", 2), ("warm-up", 1)]],
            id="groups",
        ),
        pytest.param([({"group": "7", "number": 3}, 3)], id="a number before a group"),
        pytest.param([({"at": 1.0}, 1), ({"at": 2.0}, 2), ({"at": 3.0}, 3)], id="averages"),
        pytest.param([({"at": 1.0}, k) for k in (1, 2, 3)], id="updates to the same average"),
        pytest.param(
            [({"at": 1.0, "nodes": [31]}, 1), ({"at": 1.0, "nodes": [17, 5]}, 1), ({"at": 2.0}, 2)],
            id="a round in two pushes",
        ),
        pytest.param(
            [({"kind": "train.head"}, 1), ({"kind": "train.body"}, 1), ({"at": 2.0}, 2)],
            id="two types in a round",
        ),
        pytest.param(
            [({"at": a}, r) for a, r in [(None, 1), (1.0, 1), (None, 1), (2.0, 2), (None, 2)]],
            id="steps without arrays",
        ),
        pytest.param(
            [({"kind": kind, "at": a}, r) for kind, a, r in [
                ("train", 1.0, 1), ("evaluate", 2.0, 1), ("train", 2.0, 2), ("evaluate", 3.0, 2),
                ("query", None, 1), ("train", 2.0, 3), ("query", None, 2),
            ]],
            id="types apart",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("again", [False, True], ids=["at once", "in new processes"])
def test_rounds_are_those_of_the_app(tmp_path: Path, steps: list[Step], again: bool) -> None:
    def answer(node: int, message: Message) -> RecordDict:
        if "arrays" in message.content:
            return trained(node, message)
        return RecordDict({"metrics": MetricRecord({"loss": 0.5})})

    told: Any = {"number": None}
    grid = recorded(Grid(answer), tmp_path / "x")
    for options, _ in steps:
        values = [[options.get("at", 1.0)]] if options.get("at", 1.0) else []
        given = {name: value for name, value in options.items() if name != "at"}
        if again:
            grid.close()
            grid = recorded(Grid(answer), tmp_path / "x")
        grid.send_and_receive(messages(*values, **(told | given)))
    found = Recording.read(tmp_path / "x")
    assert [line["round"] for line in found.exchanges] == [expected for _, expected in steps]
    assert [entry.round for entry in found.transcript.entries] == [
        line["round"] for line in found.exchanges if line["updates"]
    ]


# apps that push and pull


def pulled(grid: Any, numbers: list[str]) -> list[Message]:
    """Pull messages one by one, as an app does that works on what is there."""
    return [reply for number in numbers for reply in grid.pull_messages([number])]


def test_an_exchange_is_a_push_whose_replies_come_one_by_one(tmp_path: Path) -> None:
    grid = recorded(Grid(trained), tmp_path / "x")
    for number in (None, None, 3):
        numbers = grid.push_messages(messages([1.0], number=number))
        evaluated = grid.push_messages(messages([1.0], number=number, kind="evaluate"))
        # types interleave
        for one, other in zip(numbers, evaluated, strict=True):
            assert len(pulled(grid, [other, one])) == 2
    found = Recording.read(tmp_path / "x")
    by_type = {"train": [], "evaluate": []}  # type: dict[str, list[int]]
    for line in found.exchanges:
        by_type[line["kind"]].append(line["round"])
        assert line["to"] == [0, 1, 2] and "no reply" not in line["notes"].values()
    assert by_type == {"train": [1, 2, 3], "evaluate": [1, 2, 3]}
    assert found.unfinished == [] and found.transcript.count == 3


def test_silent_clients_are_noted_and_their_models_forgotten(tmp_path: Path) -> None:
    def answer(node: int, message: Message) -> RecordDict | None:
        return None if node == 5 else trained(node, message)

    model = np.zeros(1000, np.float32)
    before = tensors(1000)
    grid = recorded(Grid(answer), tmp_path / "x")
    for number in range(1, 6):
        assert len(pulled(grid, grid.push_messages(messages(model, number=number)))) == 2
        under_way = Recording.read(tmp_path / "x")
        assert [line["notes"] for line in under_way.exchanges] == [{"0": "no reply"}] * (number - 1)
        assert [gap["told"] for gap in under_way.unfinished] == [str(number)]
        # the model of this round, and what two clients replied
        assert tensors(1000) - before <= 3
    del grid
    found = Recording.read(tmp_path / "x")
    assert [line["notes"] for line in found.exchanges] == [{"0": "no reply"}] * 5
    assert (found.unfinished, found.is_open) == ([], False)
    assert tensors(1000) == before


def tensors(size: int) -> int:
    """Return how many different tensors of a size live."""
    gc.collect()
    living = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return len({item.data_ptr() for item in living if item.numel() == size})


def test_silent_clients_that_are_never_asked_again_are_forgotten_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "KEPT_BYTES", 8000)
    before = tensors(1000)
    grid = recorded(Grid(lambda node, message: None), tmp_path / "x")
    for node in range(10):
        grid.push_messages(messages(np.full(1000, node), number=node, nodes=[node]))
    assert tensors(1000) - before <= 4
    grid.close()
    assert [line["round"] for line in Recording.read(tmp_path / "x").exchanges] == list(range(10))


def test_a_late_reply_is_of_the_round_in_which_its_client_was_asked(tmp_path: Path) -> None:
    inner = Grid(trained)
    grid = recorded(inner, tmp_path / "x")
    first = grid.push_messages(messages([1.0]))
    assert len(grid.pull_messages(first[1:])) == 2
    second = grid.push_messages(messages([2.0], number=2))
    # the first node answers both, and the app gets what the grid has
    late = pulled(grid, [*second, first[0]])
    assert [reply.content["arrays"]["w0"].numpy()[0] for reply in late] == [33, 19, 7, 32]
    found = Recording.read(tmp_path / "x")
    told = [(line["round"], line["late"], line["to"], line["updates"]) for line in found.exchanges]
    assert told == [(1, False, [0, 1, 2], 2), (2, False, [0, 1, 2], 3), (1, True, [2], 1)]
    assert found.exchanges[0]["notes"] == {"2": "no reply"}
    # its model is on the disk, and its bytes were counted
    call, response = found.transcript.content(2)
    assert call.query.model.values.tolist() == [[1.0]]
    assert response.reply.delta.values.tolist() == [[31.0]]
    assert found.exchanges[2]["down"] == [0]


def test_an_app_without_rounds_that_waits_for_no_client_loses_no_update(tmp_path: Path) -> None:
    grid = recorded(Grid(trained), tmp_path / "x")
    waiting = dict(zip(NODES, grid.push_messages(messages([1.0], number=None)), strict=True))
    for step, node in enumerate([17, 31, 17, 5, 17, 31, 5], 2):
        assert len(grid.pull_messages([waiting[node]])) == 1
        (waiting[node],) = grid.push_messages(messages([step], number=None, nodes=[node]))
    pulled(grid, list(waiting.values()))
    found = Recording.read(tmp_path / "x")
    assert sum(line["updates"] for line in found.exchanges) == 10
    for message in found.transcript.seen_by(SERVER):
        if message.sender.kind == "client":
            node = found.nodes[message.sender.index or 0]
            assert message.content.delta.values.tolist() == [[node]]


def test_replies_to_messages_that_were_not_recorded_are_gaps(tmp_path: Path) -> None:
    inner = Grid(trained)
    numbers = inner.push_messages(messages([1.0]))
    grid = recorded(inner, tmp_path / "x")
    with pytest.warns(SecureClusterWarning, match="not recorded"):
        assert len(grid.pull_messages(numbers)) == 3
    grid.close()
    assert len(Recording.read(tmp_path / "x").gaps) == 3


@pytest.mark.parametrize("tells", [True, False], ids=["with a gap", "fewer numbers"])
def test_a_grid_that_does_not_send_all_messages_is_recorded(tmp_path: Path, tells: bool) -> None:
    class Refusing(Grid):
        def push_messages(self, messages: Iterable[Message]) -> list[Any]:
            numbers: list[Any] = super().push_messages(list(messages)[1:])
            return [None, *numbers] if tells else numbers

    grid = recorded(Refusing(trained), tmp_path / "x")
    numbers = [number for number in grid.push_messages(messages([1.0])) if number]
    assert len(grid.pull_messages(numbers)) == 2
    (line,) = Recording.read(tmp_path / "x").exchanges
    assert line["notes"] == {"2": "its message was not sent"} and line["updates"] == 2


def test_a_reply_that_comes_twice_is_recorded_once(tmp_path: Path) -> None:
    class Repeating(Grid):
        def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
            return 2 * super().pull_messages(numbers)

    grid = recorded(Repeating(trained), tmp_path / "x")
    for number in (1, 2):
        assert len(grid.pull_messages(grid.push_messages(messages([1.0], number=number)))) == 6
    assert len(grid.send_and_receive(messages([1.0], number=3))) == 6
    found = Recording.read(tmp_path / "x")
    assert [line["updates"] for line in found.exchanges] == [3, 3, 3] and found.gaps == []


def test_a_grid_that_fails_fails_for_the_app_alone(tmp_path: Path) -> None:
    class Failing(Grid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            raise ConnectionError("gone")

    grid = recorded(Failing(trained), tmp_path / "x")
    for call in (grid.send_and_receive, grid.push_messages):
        with pytest.raises(ConnectionError, match="gone"):
            call(messages([1.0]))
    lines = Recording.read(tmp_path / "x").exchanges
    assert [set(line["notes"].values()) for line in lines] == [{"no reply"}] * 2


def test_two_messages_to_one_node_are_two_exchanges(tmp_path: Path) -> None:
    grid = recorded(Grid(trained), tmp_path / "x")
    twice = [*messages([1.0], nodes=[31, 17]), *messages([2.0], nodes=[31])]
    assert len(grid.send_and_receive(twice)) == 3
    found = Recording.read(tmp_path / "x")
    assert [len(line["to"]) for line in found.exchanges] == [2, 1]
    assert found.transcript.content(1)[0].query.model.values.tolist() == [[2.0]]


# several writers


def test_a_second_server_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    grid = recorded(Grid(trained), tmp_path / "x")
    grid.send_and_receive(messages([1.0]))
    with pytest.raises(RunFolderError, match="written by another process"):
        recorded(Grid(trained), tmp_path / "x")
    process = os.fork()
    if not process:
        try:
            recorded(Grid(trained), tmp_path / "x")
        except RunFolderError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    grid.send_and_receive(messages([1.0], number=2))
    del grid
    recorded(Grid(trained), tmp_path / "x").send_and_receive(messages([1.0], number=3))
    found = Recording.read(tmp_path / "x")
    assert [line["round"] for line in found.exchanges] == [1, 2, 3]
    found.check_arrays()


@pytest.mark.parametrize("processes", [False, True])
def test_messages_of_one_client_at_once_are_all_recorded(tmp_path: Path, processes: bool) -> None:
    mod = recorded_client(tmp_path)
    context = Context(1, 31, {"partition-id": 4}, RecordDict(), {})

    def work(who: int) -> None:
        for k in range(5):
            (message,) = messages([float(who)], number=10 * who + k, nodes=[31])
            mod(message, context, lambda m, c: Message(trained(31, m), reply_to=m))

    if processes:
        children = []
        for who in range(3):
            children.append(os.fork())
            if not children[-1]:
                work(who)
                os._exit(0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    else:
        threads = [threading.Thread(target=work, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = Recording.read(tmp_path / "31")
    expected = sorted(10 * who + k for who in range(3) for k in range(5))
    assert sorted(line["round"] for line in found.exchanges) == expected
    assert (found.transcript.count, found.gaps, found.partitions) == (15, [], {31: 4})
    found.check_arrays()
    assert partitions_in(tmp_path) == {31: 4}


def test_a_client_whose_app_fails_is_recorded_and_fails(tmp_path: Path) -> None:
    mod = recorded_client(tmp_path)
    context = Context(1, 31, {}, RecordDict(), {})
    (message,) = messages([1.0], nodes=[31])

    def failing(message: Message, context: Context) -> Message:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mod(message, context, failing)
    assert Recording.read(tmp_path / "31").exchanges[0]["notes"] == {"0": "error of the app"}


def test_a_client_that_cannot_record_answers_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "31").mkdir()
    (tmp_path / "31" / "file").write_text("mine")
    mod = recorded_client(tmp_path)
    context = Context(1, 31, {"partition-id": 0}, RecordDict(), {})
    with pytest.warns(SecureClusterWarning, match="is not empty, and no recording") as warned:
        for number in (1, 2):
            (message,) = messages([1.0], number=number, nodes=[31])
            reply = mod(message, context, lambda m, c: Message(trained(31, m), reply_to=m))
            assert reply.content["arrays"]["w0"].numpy().tolist() == [32.0]
    assert len(warned) == 1
    assert [path.name for path in (tmp_path / "31").iterdir() if path.name[0] != "."] == ["file"]


# disks that refuse


@contextmanager
def full() -> Iterator[None]:
    """Let no file be opened to be written."""
    with pytest.MonkeyPatch.context() as patch:

        def refusing(*_: Any, **__: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "open", refusing)
        yield


@pytest.mark.parametrize("rounds", [{1}, {2}, {2, 3}, {1, 2, 3, 4}])
def test_a_full_disk_ends_no_app_and_leaves_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: set[int]
) -> None:
    facts = TrainingFacts(clip=1.0, noise=4.0, placement="local", delta=1e-5)
    folder = tmp_path / "server"
    with pytest.warns(SecureClusterWarning, match="No space left on device") as warned:
        with full() if 1 in rounds else nullcontext():
            grid = recorded(Grid(trained), folder, facts)
        mod = recorded_client(tmp_path, facts)
        context = Context(1, 31, {"partition-id": 0}, RecordDict(), {})
        for number in range(1, 6):
            with full() if number in rounds else nullcontext():
                replies = grid.send_and_receive(messages([number], number=number))
                (message,) = messages([number], number=number, nodes=[31])
                reply = mod(message, context, lambda m, c: Message(trained(31, m), reply_to=m))
            moved = [one.content["arrays"]["w0"].numpy()[0] for one in [*replies, reply]]
            assert moved == [number + node for node in [*NODES, 31]]
        grid.close()
    # one of the server, and one of the client
    assert len(warned) == 2
    for path in (folder, tmp_path / "31"):
        found = Recording.read(path)
        found.check_arrays()
        assert {line["round"] for line in found.exchanges} == set(range(1, 6)) - rounds
        assert [gap["told"] for gap in found.gaps] == [str(number) for number in sorted(rounds)]
        text = price(found)
        assert f"and {len(rounds)} gap" in text
        # each gap is priced as a round
        exact = gaussian_epsilon(5**0.5 / 4.0, 1e-5)
        assert exact <= float(text.split("(")[1].split(",")[0]) * 1.005 <= exact * 1.1
        assert main(["report", str(path)]) == 0
        assert f"The recording has {len(rounds)} gap" in " ".join(capsys.readouterr().out.split())
        results = audit_recording(path, attacks=["linkage"])
        assert any("The recording has" in note for note in results.notes)


def test_a_damaged_recording_is_refused_before_the_app_begins(tmp_path: Path) -> None:
    recorded(Grid(trained), tmp_path / "x").send_and_receive(messages([1.0]))
    (tmp_path / "x" / EXCHANGES).write_text("")
    with pytest.raises(RunFolderError, match=r"exchanges.jsonl differs"):
        recorded(Grid(trained), tmp_path / "x")
    # and the lock is free
    with pytest.raises(RunFolderError, match=r"exchanges.jsonl differs"):
        recorded(Grid(trained), tmp_path / "x")
