"""Runs whose clients are in blocks on Ray's actors: equal to the bit to runs in one process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest

from securecluster import Federation, Settings
from securecluster.attacks.experiments import tapped
from securecluster.cli.main import main
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import pack
from securecluster.errors import FrameError, RunFolderError, UsageError
from securecluster.messaging import chunks
from securecluster.results.fitted_state import FittedState
from securecluster.runs.ray_blocks import RayBlocks, blocks_of
from securecluster.runs.ray_cluster import RayCluster

ray = pytest.importorskip("ray")

CORES = 2
# Ray leaves sockets and processes to their end
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SMALL: dict[str, Any] = {"rounds": 3, "epochs": 1, "model": "linear"}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 0.7}
# a run's name, its hyper-parameters, and its settings
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fedavg": ("fedavg", {}, {}),
    "cfl, mask": ("cfl", {"mask": "permutation"}, {}),
    "flhc, secagg": ("flhc", {"aggregation": "secagg"}, {}),
    "oneshot, pads": ("oneshot", {"relevance": "pads"}, {}),
    "srfca": ("srfca", {}, {}),
    "ifca": ("ifca", {}, {}),
    "signature, noise": ("signature noise", {}, {}),
    "fedavg, DP-SGD": ("fedavg", {**NOISE, "dp_unit": "example"}, {}),
    "mrmtl, dropout": ("mrmtl", {}, {"dropout": 0.2}),
}
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ifca, hidden": ("ifca", {"aggregation": "secagg"}, {}),
    "hidden": ("hidden", {}, {}),
    "cfl, target": ("cfl", {"dp_unit": "client", "clip": 1.0, "target_epsilon": 5.0}, {}),
    "finetune": ("finetune", {}, {}),
    "cfl, tuned": ("cfl", {"tune_rounds": 2}, {}),
    "clove": ("clove", {}, {}),
    "oneshot, hierarchical": ("oneshot hierarchical", {}, {}),
    "cfl, float64": ("cfl fallback", {}, {"dtype": "float64"}),
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return cases.two_clusters(6, 24)


def start(**options: Any) -> None:
    """Start Ray, or connect to a cluster."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(log_to_driver=False, **options)


@pytest.fixture(scope="module")
def local() -> Iterator[None]:
    """Ray on this machine."""
    # another test process may have started a cluster, which Ray would connect to
    start(address="local", num_cpus=CORES, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


def run_of(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return what makes a protocol, and the settings of its run."""
    variant, params, settings = {**RUNS, **MORE}[name]
    return lambda: cases.variant(variant, **{**SMALL, **params}), {"threads": 1, **settings}


def in_blocks(settings: dict[str, Any], workers: int = CORES) -> Settings:
    return Settings(**settings, engine="ray", workers=workers)


def assert_equal(one: FittedState, other: FittedState) -> None:
    """Check that two runs have equal results."""
    assert one.server == other.server
    first, second = one.learned, other.learned
    assert first.labels == second.labels
    assert first.local == second.local
    assert first.agreement == second.agreement
    np.testing.assert_array_equal(first.scores, second.scores)
    assert repr(first.history) == repr(second.history)  # NaN is not equal to itself
    assert first.bytes == second.bytes
    assert first.network.ledger.events == second.network.ledger.events
    assert pack(first.network) == pack(second.network)
    a, b = one.clients, other.clients
    assert torch.equal(a.table[a.index], b.table[b.index])
    assert a.secrets == b.secrets
    assert a.extra.keys() == b.extra.keys()
    assert all(torch.equal(a.extra[name], b.extra[name]) for name in a.extra)


def check_equal(name: str, federation: Federation) -> None:
    make, settings = run_of(name)
    one = make().fit(federation, Settings(**settings)).kept_
    assert_equal(one, make().fit(federation, in_blocks(settings)).kept_)


@pytest.mark.parametrize("name", [*RUNS, *(cases.exhaustive(name) for name in MORE)])
def test_a_run_in_blocks_equals_one_in_one_process(
    name: str, local: None, federation: Federation
) -> None:
    check_equal(name, federation)


@pytest.mark.parametrize("name", ["fedavg", cases.exhaustive("ifca"), cases.exhaustive("srfca")])
def test_blocks_send_the_sums_of_parts_that_are_theirs(
    name: str, local: None, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # parts of two clients, of which the second has one of each block
    monkeypatch.setattr(chunks, "chunk_size", lambda reply: 2)
    monkeypatch.setattr(chunks, "FIRST_CHUNK", 2)
    came: list[bool] = []
    ask = RayBlocks.ask

    def keep(blocks: RayBlocks, method: str, contents: Any) -> Any:
        replies = ask(blocks, method, contents)
        if method == "piece":
            came.extend(reply.added is not None for reply in replies.values())
        return replies

    monkeypatch.setattr(RayBlocks, "ask", keep)
    check_equal(name, federation)
    assert came[:4] == [True, False, False, True]


@pytest.mark.parametrize("clients", [1, 6, 64, 100, 200, 1000])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_blocks_are_of_nearly_equal_numbers_of_consecutive_clients(
    clients: int, workers: int
) -> None:
    workers = min(workers, clients)
    blocks = blocks_of(clients, workers)
    assert [position for block in blocks for position in block] == list(range(clients))
    assert len(blocks) == workers
    assert all(blocks)
    assert max(map(len, blocks)) <= 1.1 * math.ceil(clients / workers)
    if clients / workers >= 16 / 0.1:  # the nearest part of a sum begins at most 16 clients away
        assert all(block[0] % 32 == 0 for block in blocks)


def killing(patch: pytest.MonkeyPatch, method: str, times: Callable[[int], bool]) -> list[int]:
    """Kill an actor during some requests of a method, and return which they were."""
    send = RayBlocks.send
    count = 0
    killed: list[int] = []

    def send_and_kill(blocks: RayBlocks, name: str, contents: Any) -> None:
        nonlocal count
        send(blocks, name, contents)
        if name == method:
            count += 1
            if times(count):
                killed.append(count)
                ray.kill(blocks.handles[count % len(blocks)])

    patch.setattr(RayBlocks, "send", send_and_kill)
    return killed


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("answer", 4),
        cases.exhaustive("answer", 1),
        cases.exhaustive("hold", 2),
        ("piece", 2),
        cases.exhaustive("evaluate", 2),
    ],
)
def test_an_actor_that_dies_loses_nothing(
    method: str, number: int, local: None, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killing(monkeypatch, method, lambda count: count == number)

    def make() -> Any:
        options = {**NOISE, "dp_unit": "client", "mask": "permutation", "keep_momentum": True}
        name = "fedavg" if method in ("hold", "piece") else "cfl"
        return cases.variant(name, **SMALL, **options, momentum=0.5)

    one = make().fit(federation, Settings(threads=1)).kept_
    assert_equal(one, make().fit(federation, in_blocks({"threads": 1})).kept_)
    assert killed == [number]


@pytest.mark.exhaustive
def test_actors_that_die_again_and_again_end_the_run(
    local: None, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = RayBlocks._send

    def send_and_kill(blocks: RayBlocks, actor: Any, *request: Any) -> None:
        send(blocks, actor, *request)
        ray.kill(actor.handle)

    monkeypatch.setattr(RayBlocks, "_send", send_and_kill)
    with pytest.raises(UsageError, match="died 3 times"):
        cases.variant("fedavg", **SMALL).fit(federation, in_blocks({"threads": 1}))


@pytest.mark.parametrize("method", ["_ready", cases.exhaustive("learn"), "_restore_all"])
def test_an_actor_that_dies_before_the_first_call_loses_nothing(
    method: str,
    local: None,
    federation: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Any:
        return cases.variant("cfl", **SMALL, dp_unit="client", clip=1.0, target_epsilon=5.0)

    alone = make().fit(federation, Settings(threads=1)).kept_
    settings = in_blocks({"threads": 1})
    with pytest.raises(KeyboardInterrupt):
        make().fit(federation, settings, folder=tmp_path, report=cases.interrupt_after(2))
    asks = getattr(RayBlocks, method)
    killed: list[Any] = []

    def kill_and_ask(blocks: RayBlocks, *arguments: Any) -> Any:
        if not killed:
            killed.append(blocks.handles[0])
            ray.kill(blocks.handles[0])
        return asks(blocks, *arguments)

    monkeypatch.setattr(RayBlocks, method, kill_and_ask)
    assert_equal(alone, make().fit(federation, settings, folder=tmp_path).kept_)
    assert len(killed) == 1


def test_an_actor_that_is_ended_for_want_of_memory_is_made_again(
    local: None, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's monitor of memory raises an error that is none of an actor."""
    got = RayCluster.got
    ended: list[int] = []

    def end(cluster: RayCluster, reference: Any, seconds: float | None = None) -> Any:
        ended.append(1)
        if len(ended) in (1, 5):
            monkeypatch.setattr(ray, "get", out_of_memory)
        return got(cluster, reference, seconds)

    get = ray.get

    def out_of_memory(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(ray, "get", get)
        raise ray.exceptions.OutOfMemoryError("the node ran low on memory")

    monkeypatch.setattr(RayCluster, "got", end)
    check_equal("cfl, mask", federation)
    assert len(ended) > 5


def test_a_run_goes_on_in_blocks(local: None, federation: Federation, tmp_path: Path) -> None:
    def make() -> Any:
        return cases.variant("cfl", **SMALL, mask="permutation")

    alone = make().fit(federation, Settings(threads=1))
    settings = in_blocks({"threads": 1})
    with pytest.raises(KeyboardInterrupt):
        make().fit(federation, settings, folder=tmp_path, report=cases.interrupt_after(2))
    with pytest.raises(RunFolderError, match="engine was 'ray' there and is 'process' now"):
        make().fit(federation, Settings(threads=1), folder=tmp_path)
    with pytest.raises(RunFolderError, match="workers was 2 there and is 3 now"):
        make().fit(federation, in_blocks({"threads": 1}, workers=3), folder=tmp_path)
    # as many blocks as there were
    resumed = make().fit(federation, in_blocks({"threads": 1}, workers=0), folder=tmp_path)
    assert_equal(alone.kept_, resumed.kept_)
    newcomers = cases.two_clusters(8, 24).select([6, 7])
    assert list(resumed.join(newcomers)) == list(alone.join(newcomers))


@pytest.mark.exhaustive
def test_a_clients_refusal_ends_the_run_with_its_sentence(
    local: None, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = RayBlocks.send

    def send_of_another_run(blocks: RayBlocks, name: str, contents: Any) -> None:
        if name in ("answer", "hold"):
            contents = {b: replace(call, config="0" * 32) for b, call in contents.items()}
        send(blocks, name, contents)

    monkeypatch.setattr(RayBlocks, "send", send_of_another_run)
    with pytest.raises(FrameError, match="the server runs another configuration"):
        cases.variant("fedavg", **SMALL).fit(federation, in_blocks({"threads": 1}))


@pytest.mark.exhaustive
def test_messages_go_to_blocks_and_not_to_clients(
    local: None, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []
    close = RayBlocks.close

    def keep(blocks: RayBlocks) -> None:
        counted.append(blocks.traffic)
        close(blocks)

    monkeypatch.setattr(RayBlocks, "close", keep)
    fitted = cases.variant("fedavg", **SMALL).fit(federation, in_blocks({"threads": 1}))
    (traffic,) = counted
    rounds = SMALL["rounds"]
    calls = rounds + 1  # the last one brings all clients the last average
    # beside calls: replies of each sum, scores after each round, and models and their scores
    assert traffic.messages == 2 * CORES * (calls + 2 * rounds + 2)
    assert traffic.bytes < 3 * (fitted.bytes_["up"] + fitted.bytes_["down"])


def test_an_experiment_is_refused(federation: Federation) -> None:
    with pytest.raises(UsageError, match="an experiment changes what clients reply"):
        tapped(cases.variant("fedavg", **SMALL), federation, in_blocks({}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fedavg", "flhc, secagg"])
def test_a_run_on_two_nodes_equals_one_in_one_process(name: str, federation: Federation) -> None:
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        start(address=cluster.address)
        # each node has room for one block
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        check_equal(name, federation)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_ray_is_asked_for_by_name(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = cases.variant("fedavg", **SMALL)
    with pytest.raises(UsageError, match="unknown engine 'rya'"):
        made.fit(federation, Settings(engine="rya"))
    with pytest.raises(UsageError, match="workers are blocks of the engine ray"):
        made.fit(federation, Settings(workers=2))
    with pytest.raises(UsageError, match="workers is a whole number from 0"):
        made.fit(federation, Settings(engine="ray", workers=-1))
    assert main(["run", "fedavg", "--engine", "rya"]) == 2
    assert "unknown --engine 'rya': did you mean 'ray'?" in capsys.readouterr().err
    assert main(["sweep", "fedavg", "--clip", "1", "--noise", "0", "--engine", "ray"]) == 2
    assert "a sweep runs whole runs side by side" in capsys.readouterr().err
    monkeypatch.setattr("securecluster.runtime.settings.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs Ray: pip install ray"):
        made.fit(federation, Settings(engine="ray"))


def in_a_process(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script whose Ray is its own, and return what came of it."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests / "protocols"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


FAILS_AND_GOES_ON = """
import os, signal
import numpy as np
import ray
from securecluster import CFL, Federation, Settings
from securecluster.core.lazy_torch import torch
from securecluster.errors import SecureClusterError
from securecluster.runs.ray_blocks import RayBlocks

def start(**options):
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, **options)

draws = np.random.default_rng(0)
arrays = [(draws.normal(size=(6, 784)), draws.integers(0, 10, 6)) for _ in range(CLIENTS)]
federation = Federation.from_arrays(arrays, classes=10, seed=0)

def make():
    return CFL(rounds=3, epochs=1, model="mlp-200", momentum=0.5, keep_momentum=True)

def fit(folder):
    settings = Settings(threads=1, keys_from_seed=True, engine="ray", workers=2)
    return make().fit(federation, settings, folder=folder)

# in blocks of the same sizes, since products round by the size of a batch on some processors
start()
undisturbed = fit("undisturbed").kept_
ray.shutdown()
start(**OPTIONS)
FAIL
try:
    fit("run")
except SecureClusterError as error:
    print("told:", error)
ray.shutdown()
UNDO
start()
resumed = fit("run").kept_
a, b = undisturbed.clients, resumed.clients
assert torch.equal(a.table[a.index], b.table[b.index])
assert undisturbed.learned.labels == resumed.learned.labels
assert undisturbed.learned.network.ledger.events == resumed.learned.network.ledger.events
print("equal")
"""
# 80 MB are the least that Ray takes, and this part of a disk is always in use
FULL_STORE = """dict(
    object_store_memory=80 * 2**20,
    _system_config={"object_store_full_delay_ms": 20, "local_fs_capacity_threshold": 0.001},
)"""
KILLED_RAYLET = """
send, count = RayBlocks.send, 0
def send_and_kill(blocks, *request):
    global count
    count += 1
    if count == 8:
        (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)
        raylet.process.wait()
    return send(blocks, *request)
RayBlocks.send = send_and_kill
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("clients", "options", "fail", "undo", "sentence"),
    [
        (160, FULL_STORE, "", "", "the disk on which Ray keeps"),
        (12, "{}", KILLED_RAYLET, "RayBlocks.send = send", "Ray has ended on this machine"),
    ],
    ids=["a full object store", "a killed raylet"],
)
def test_a_run_goes_on_after_ray_could_not(
    clients: int, options: str, fail: str, undo: str, sentence: str, tmp_path: Path
) -> None:
    script = FAILS_AND_GOES_ON.replace("CLIENTS", str(clients)).replace("OPTIONS", options)
    done = in_a_process(script.replace("FAIL", fail).replace("UNDO", undo), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray itself prints the last lines of what ended
    told, equal = [line for line in done.stdout.splitlines() if line.startswith(("told", "equal"))]
    assert told.startswith(f"told: {sentence}")
    assert "resume the run from its folder" in told
    assert equal == "equal"


@pytest.mark.exhaustive
def test_a_quiet_run_in_blocks_says_nothing(tmp_path: Path) -> None:
    arguments = ["run", "fedavg", "--rounds", "2", "--clients", "4", "--model", "linear"]
    arguments += ["--engine", "ray", "--workers", "2", "--quiet", "--out", "run"]
    script = f"from securecluster.cli.main import main; raise SystemExit(main({arguments!r}))"
    done = in_a_process(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
