"""A client's own budget: what it allows over runs, and that nothing leaves beyond it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import DOUBLE, run_server, two_clusters, with_authority

from securecluster import Federation
from securecluster.errors import (
    BudgetError,
    RefusedError,
    RunFolderError,
    SecureClusterWarning,
    UsageError,
)
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Empty
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.dp.ledger import Event
from securecluster.protocols import FedAvg, OneShot, Settings
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.transport import Framed

NOISE: dict[str, Any] = {"clip": 1.0, "noise": 2.0, "model": "linear", "epochs": 1, "mask": "none"}
WAYS: dict[str, dict[str, Any]] = {
    "local": NOISE,
    "central": {**NOISE, "placement": "central"},
    "distributed": {**NOISE, "placement": "distributed", "aggregation": "secagg"},
    "example": {**NOISE, "dp_unit": "example", "noise": 1.0},
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(4, 20)


def nodes(
    made: FedAvg, federation: Federation, budget: Budget | None, simulated: bool = True
) -> list[Any]:
    """Return a node for each client, the first of which has the budget."""
    build = partial(build_client, made, federation, DOUBLE, key_source=KeySource(simulated))
    return [build([i], budget=budget if i == 0 else None) for i in range(len(federation))]


def run(made: FedAvg, federation: Federation, own: list[Any]) -> Any:
    """Run the server over the nodes, and return its channel."""
    config = made.config(federation, "float64")
    doors = {i: node.answer_frame for i, node in enumerate(own)}
    framed = Framed(doors, lambda name: call_types(made, name)[1])
    net = build_network(made, with_authority(made, config, framed), config)
    if made.privacy.per_example:
        net.state.ledger.samples = dict(enumerate(config["sizes"]))
    net.state.ledger.names = dict(enumerate(federation.names))
    run_server(made, net)
    return net


@pytest.mark.parametrize("way", WAYS)
def test_a_budget_spends_what_the_servers_ledger_says(
    way: str, federation: Federation, tmp_path: Path
) -> None:
    made = FedAvg(rounds=2, **WAYS[way])
    budget = Budget(tmp_path / "b", 1e9, unit="example" if way == "example" else "client")
    net = run(made, federation, nodes(made, federation, budget))
    ledger = net.state.ledger.of([federation.names[0]])
    assert 0 < ledger.price(1e-5).epsilon < 1e9
    assert budget.spent == pytest.approx(ledger.price(1e-5).epsilon, rel=1e-9)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600


def test_runs_add_up_until_the_client_takes_part_no_more(
    federation: Federation, tmp_path: Path
) -> None:
    # of a Gaussian of z = 2 each: three releases cost mu = sqrt(3)/2
    allowed = gaussian_epsilon(3**0.5 / 2, 1e-5)
    path = tmp_path / "b"
    for rounds in (1, 2):
        made = FedAvg(rounds=rounds, **NOISE)
        run(made, federation, nodes(made, federation, Budget(path, 1.001 * allowed)))
    budget = Budget(path, 1.001 * allowed)
    assert budget.spent == pytest.approx(allowed, rel=0.01)
    made = FedAvg(rounds=3, **NOISE)
    own = nodes(made, federation, budget)
    with pytest.raises(BudgetError, match=r"contribute would bring .* over all runs to epsilon"):
        run(made, federation, own)
    # a deployed client says so by a code, and the others go on
    own = nodes(made, federation, budget, simulated=False)
    with pytest.warns(SecureClusterWarning, match="client/0 refused contribute .* budget"):
        net = run(made, federation, own)
    assert all(0 not in event.ids for event in net.state.ledger.events)
    assert net.state.refused == {0: {"budget": [1, 2, 3]}} and 0 not in net.state.lost
    assert budget.spent == pytest.approx(allowed, rel=0.01)


@pytest.mark.parametrize("way", WAYS)
def test_an_equal_run_with_new_keys_has_new_noise_and_is_spent_again(
    way: str, federation: Federation, tmp_path: Path
) -> None:
    unit = "example" if way == "example" else "client"
    spent = []
    for _ in range(2):
        made = FedAvg(rounds=1, **WAYS[way])
        # nodes that keep no keys of an earlier run
        budget = Budget(tmp_path / "b", 1e9, unit=unit)
        own = nodes(made, federation, budget, simulated=False)
        run(made, federation, own)
        spent.append(budget.spent)
    assert spent[1] > 1.2 * spent[0]


def test_nothing_leaves_and_nothing_is_spent_beyond_it(
    federation: Federation, tmp_path: Path
) -> None:
    made = FedAvg(rounds=1, **NOISE)
    budget = Budget(tmp_path / "b", 0.01)
    (node, *_) = nodes(made, federation, budget, simulated=False)
    fitted = FedAvg(rounds=1, **NOISE).fit(federation, Settings(transcript="full", dtype="float64"))
    call, told = fitted.transcript_.content(0)
    frame = node.answer_frame(wire.encode(call.header(0), call.query))
    assert len(frame) < 1000 < wire.size(call.header(0), told.reply)
    with pytest.raises(RefusedError, match="privacy budget"):
        wire.decode(frame, type(told.reply))
    assert budget.spent == 0 and not budget.path.exists()


def test_an_exact_release_exceeds_every_budget(federation: Federation, tmp_path: Path) -> None:
    made = FedAvg(rounds=1, model="linear", epochs=1)
    with pytest.raises(BudgetError, match="epsilon = inf"):
        run(made, federation, nodes(made, federation, Budget(tmp_path / "b", 1e9)))


def test_the_same_reply_again_is_spent_once_and_a_killed_client_has_spent_it(
    federation: Federation, tmp_path: Path
) -> None:
    made = FedAvg(rounds=1, **NOISE)
    fitted = FedAvg(rounds=1, **NOISE).fit(federation, Settings(transcript="full", dtype="float64"))
    call, _ = fitted.transcript_.content(0)
    data = wire.encode(call.header(0), call.query)
    spent = set()
    for _ in range(2):  # a new process each time, that keeps its file and its keys
        budget = Budget(tmp_path / "b", 100.0)
        (node, *_) = nodes(made, federation, budget)
        node.answer_frame(data)
        node.answer_frame(data)
        spent.add(budget.spent)
        assert Budget(tmp_path / "b", 100.0).spent == budget.spent
    assert len(spent) == 1


def test_a_gram_matrix_is_spent_once_and_another_one_again(tmp_path: Path) -> None:
    clients = two_clusters(clients=4, samples=40, seed=0)
    first = clients.shards[0]
    other = replace(clients, shards=(replace(first, x=1 - first.x), *clients.shards[1:]))
    made = OneShot(rounds=1, tasks=2, mask="none", sealed=False, gram_noise=2.0, model="linear")
    budget = Budget(tmp_path / "b", 1e9, unit="example")
    run_of = config_hash(made.config(clients, "float32"))
    spent = []
    # another call of the same process and of a new one, and then one with other data
    for step, data in ((1, clients), (2, clients), (3, other)):
        node = build_client(made, data, Settings(), [0], budget=budget)
        for _ in range(2):
            node.answer(Call(run_of, "eigen", "gather", 0, step, (0,), Empty(), (1,)))
        spent.append(budget.spent)
    once, twice = gaussian_epsilon(1 / 2, 1e-5), gaussian_epsilon(2**0.5 / 2, 1e-5)
    assert spent == pytest.approx([once, once, twice], rel=1e-9)


def test_what_is_reserved_is_on_the_disk_before_it_leaves(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FedAvg(rounds=1, **WAYS["distributed"])
    budget = Budget(tmp_path / "b", 100.0)
    own = nodes(made, federation, budget)
    seen = []
    masked = own[0].halves["sum"].hidden

    def killed(*positional: Any) -> Any:
        seen.append(Budget(tmp_path / "b", 100.0).spent)
        raise KeyboardInterrupt

    assert masked
    own[0].halves["sum"].hidden = killed
    with pytest.raises(KeyboardInterrupt):
        run(made, federation, own)
    assert seen[0] > 0 and Budget(tmp_path / "b", 100.0).spent == seen[0]


EVENT = Event("contribute", "sum", ("delta",), 1, (0,), "gaussian", 2.0, digests=("0" * 16,))


def test_two_objects_of_one_file_know_of_each_other(tmp_path: Path) -> None:
    one, other = (Budget(tmp_path / "b", 3.0) for _ in range(2))
    one.reserve("a" * 32, [EVENT])
    with pytest.raises(BudgetError):
        other.reserve("b" * 32, [EVENT, EVENT, EVENT])
    # equal events of two runs are two releases, and those of one run are one
    other.reserve("b" * 32, [EVENT])
    other.reserve("a" * 32, [EVENT])
    assert one.path.read_bytes().count(b"\n") == 3
    assert Budget(tmp_path / "b", 3.0).spent == pytest.approx(
        gaussian_epsilon(2**0.5 / 2, 1e-5), rel=1e-6
    )


@pytest.mark.parametrize("damage", ["changed", "removed", "moved", "emptied"])
def test_a_file_that_was_changed_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "b"
    budget = Budget(path, 10.0)
    for name in "ab":
        budget.reserve(name * 32, [EVENT])
    lines = path.read_bytes().splitlines(keepends=True)
    contents = {
        "changed": lines[0] + lines[1].replace(b"2.0", b"9.0") + lines[2],
        "removed": lines[0] + lines[2],
        "moved": lines[0] + lines[2] + lines[1],
        "emptied": b"",
    }
    path.write_bytes(contents[damage])
    with pytest.raises(RunFolderError, match="restore it from a copy"):
        budget.reserve("c" * 32, [EVENT])
    if damage != "emptied":
        with pytest.raises(RunFolderError, match="restore it from a copy"):
            Budget(path, 10.0)


def sealed(*contents: dict[str, Any]) -> bytes:
    """A file whose lines are in order, as another version might write it."""
    data = b""
    for content in contents:
        text = json.dumps(content).encode()
        before = hashlib.sha256(data).hexdigest().encode()
        data += hashlib.sha256(before + text).hexdigest().encode() + b" " + text + b"\n"
    return data


def test_lines_that_no_version_of_this_one_wrote_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b"
    budget = Budget(path, 10.0)
    budget.reserve("a" * 32, [EVENT])
    header, line = (json.loads(text.partition(b" ")[2]) for text in path.read_bytes().splitlines())
    assert sealed(header, line) == path.read_bytes()
    of_another_client = {**line, "event": {**line["event"], "ids": [1]}}
    for other in (of_another_client, {"run": "a"}, {**line, "event": 1}, {**line, "event": {}}):
        path.write_bytes(sealed(header, other))
        with pytest.raises(RunFolderError, match="restore it from a copy"):
            Budget(path, 10.0)
    path.write_bytes(sealed({**header, "budget": 2}, line))
    with pytest.raises(RunFolderError, match="another version: use the one that wrote it"):
        Budget(path, 10.0)


def test_a_line_that_a_kill_cut_off_was_never_released(tmp_path: Path) -> None:
    path = tmp_path / "b"
    Budget(path, 10.0).reserve("a" * 32, [EVENT])
    whole = path.read_bytes()
    path.write_bytes(whole + b"0123 {")
    budget = Budget(path, 10.0)
    assert path.read_bytes() == whole
    budget.reserve("b" * 32, [EVENT])
    assert Budget(path, 10.0).spent == budget.spent > 0


def test_what_does_not_fit_is_said(federation: Federation, tmp_path: Path) -> None:
    for wrong in ({"epsilon": 0.0}, {"epsilon": 1.0, "delta": 1.0}, {"epsilon": float("nan")}):
        with pytest.raises(UsageError, match="give an epsilon above 0"):
            Budget(tmp_path / "b", **wrong)
    with pytest.raises(UsageError, match="client or example"):
        Budget(tmp_path / "b", 1.0, unit="sample")
    budget = Budget(tmp_path / "b", 10.0)
    made = FedAvg(rounds=1, **NOISE)
    with pytest.raises(UsageError, match="budget is float: make it with Budget"):
        build_client(made, federation, DOUBLE, [0], budget=1.0)
    with pytest.raises(UsageError, match="a budget is of one client"):
        build_client(made, federation, DOUBLE, [0, 1], budget=budget)
    example = FedAvg(rounds=1, **WAYS["example"])
    with pytest.raises(UsageError, match="give another file, for example"):
        build_client(example, federation, DOUBLE, [0], budget=budget)
    budget.reserve("a" * 32, [EVENT])
    with pytest.raises(UsageError, match="budget for the unit client"):
        Budget(tmp_path / "b", 10.0, unit="example")


@pytest.mark.parametrize(
    "content", [b"a thesis", b"0123456789abcdef {", b"a\nb\n", b"\0", b"[" * 100_000, b"\n"]
)
def test_a_file_of_somebody_else_is_no_ledger_that_a_kill_cut_off(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="differs from what was written there"):
        Budget(path, 1.0)
    assert path.read_bytes() == content


def test_a_first_line_that_a_kill_cut_off_is_written_anew(tmp_path: Path) -> None:
    whole = sealed({"budget": 1, "unit": "client"})
    for length in range(1, len(whole)):
        path = tmp_path / str(length)
        path.write_bytes(whole[:length])
        assert Budget(path, 1.0).spent == 0
        # another process may have written for the other unit
        path.write_bytes(whole[:length])
        assert Budget(path, 1.0, unit="example").spent == 0


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_what_is_in_the_place_of_a_lock_is_not_emptied(kind: str, tmp_path: Path) -> None:
    lock, victim = tmp_path / "ledger.jsonl.lock", tmp_path / "victim"
    victim.write_text("precious")
    if kind == "file":
        lock.write_text("precious")
    elif kind == "link":
        lock.symlink_to(victim)
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(RunFolderError, match=r"remove the link|in the place of a lock"):
        Budget(tmp_path / "ledger.jsonl", 1.0)
    assert victim.read_text() == "precious"
    assert kind != "file" or lock.read_text() == "precious"
