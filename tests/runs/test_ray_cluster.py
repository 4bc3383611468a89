"""Every error of Ray is a death that can be made good, or one sentence that says how to go on.

Most of it needs no Ray: a stand-in raises its errors.
"""

from __future__ import annotations

import inspect
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from securecluster.errors import FrameError, RunFolderError, SecureClusterError, UsageError
from securecluster.runs import ray_cluster
from securecluster.runs.ray_cluster import ActorLostError, RayCluster


class RayError(Exception):
    pass


class RayActorError(RayError):
    actor_init_failed = False


class RayTaskError(RayError):
    def __init__(self, cause: Exception | None) -> None:
        super().__init__("a long traceback")
        self.cause = cause


class GetTimeoutError(RayError, TimeoutError):
    pass


def named(name: str, *bases: type[Exception]) -> type[Exception]:
    return type(name, bases, {})


ActorDiedError = named("ActorDiedError", RayActorError)
OutOfMemoryError = named("OutOfMemoryError", RayError)
WorkerCrashedError = named("WorkerCrashedError", RayError)
ObjectLostError = named("ObjectLostError", RayError)
OwnerDiedError = named("OwnerDiedError", ObjectLostError)
EXCEPTIONS = SimpleNamespace(
    RayError=RayError,
    RayActorError=RayActorError,
    RayTaskError=RayTaskError,
    GetTimeoutError=GetTimeoutError,
    OutOfMemoryError=OutOfMemoryError,
    WorkerCrashedError=WorkerCrashedError,
)
DEATHS = [RayActorError, ActorDiedError, OutOfMemoryError, WorkerCrashedError]
# an error, and what the sentence says
ENDS: list[tuple[Exception, str]] = [
    (named("ObjectStoreFullError", RayError)("full"), "object store of Ray is full"),
    (named("OutOfDiskError", RayError)("full"), "make room there"),
    (ObjectLostError("lost"), "lost with a machine"),
    (OwnerDiedError("lost"), "lost with a machine"),
    (named("ActorUnschedulableError", RayError)("none"), "no machine of the cluster has room"),
    (named("NodeDiedError", RayError)("dead.\nmore"), r"Ray failed \(NodeDiedError: dead\)"),
    (named("RaySystemError", RayError)("odd"), r"Ray failed \(RaySystemError: odd\)"),
    (ConnectionError("refused"), r"Ray failed \(ConnectionError: refused\)"),
    (RuntimeError("shut down"), r"Ray failed \(RuntimeError: shut down\)"),
    (ValueError("unknown object"), r"Ray failed \(ValueError: unknown object\)"),
    (RayError(), "Ray failed"),
]


class StandIn:
    """What a run asks of Ray, each of which raises an error."""

    exceptions = EXCEPTIONS

    def __init__(self, error: BaseException, init: bool = False) -> None:
        self._error = error
        self._init = init
        self.options: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return not self._init

    def init(self, **options: Any) -> None:
        self.options = options
        raise self._error

    def _raises(self, *_: Any, **__: Any) -> Any:
        raise self._error

    cluster_resources = put = get = kill = remote = _raises

    @property
    def handle(self) -> Any:
        method = SimpleNamespace(remote=self._raises, options=lambda **_: method)
        return SimpleNamespace(answer=method, __ray_ready__=method)


def cluster_of(patch: pytest.MonkeyPatch, ray: Any) -> RayCluster:
    patch.setitem(sys.modules, "ray", ray)
    return RayCluster()


USES: dict[str, Callable[[RayCluster, Any], Any]] = {
    "count": lambda cluster, _: cluster.count("CPU"),
    "begin": lambda cluster, _: cluster.begin(object, {"num_cpus": 1}),
    "ready": lambda cluster, handle: cluster.ready(handle),
    "call": lambda cluster, handle: cluster.call(handle, "answer", 1),
    "call, several results": lambda cluster, handle: cluster.call(handle, "answer", 1, returns=3),
    "put": lambda cluster, _: cluster.put(1),
    "got": lambda cluster, _: cluster.got(None),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("error", "sentence"), ENDS, ids=[type(e).__name__ for e, _ in ENDS])
def test_what_ends_a_run_is_one_sentence_that_says_how_to_go_on(
    use: str, error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = StandIn(error)
    cluster = cluster_of(monkeypatch, ray)
    with pytest.raises(RunFolderError, match=f"{sentence}.*resume the run from its folder") as told:
        USES[use](cluster, ray.handle)
    assert not isinstance(told.value, ActorLostError)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", DEATHS, ids=lambda kind: kind.__name__)
def test_a_death_is_told_from_what_ends_a_run(
    use: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = StandIn(kind("dead"))
    with pytest.raises(ActorLostError, match="resume"):
        USES[use](cluster_of(monkeypatch, ray), ray.handle)


@pytest.mark.parametrize("error", [FrameError("refused"), MemoryError(), KeyError("a mistake")])
def test_the_error_of_a_method_is_raised_as_it_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of(monkeypatch, StandIn(RayTaskError(error)))
    with pytest.raises(type(error)) as raised:
        cluster.got(None)
    assert raised.value is error


@pytest.mark.parametrize(
    ("cause", "kind", "sentence"),
    [
        (ENDS[0][0], RunFolderError, "object store of Ray is full"),
        (OutOfMemoryError("killed"), ActorLostError, "died"),
        (None, RunFolderError, "Ray failed"),
    ],
)
def test_an_error_of_ray_in_an_actor_is_one_of_ray(
    cause: Exception | None, kind: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of(monkeypatch, StandIn(RayTaskError(cause)))
    with pytest.raises(kind, match=sentence):
        cluster.got(None)


def test_an_actor_that_cannot_be_made_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RayActorError("died in its creation task\nModuleNotFoundError: No module named 'own'")
    error.actor_init_failed = True
    with pytest.raises(UsageError, match=r"do not start in Ray \(ModuleNotFoundError: No module"):
        cluster_of(monkeypatch, StandIn(error)).got(None)


def test_time_that_is_over_is_told_from_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        cluster_of(monkeypatch, StandIn(GetTimeoutError())).got(None, 1.0)


@pytest.mark.parametrize("error", [RayActorError(), ENDS[0][0], ConnectionError()])
def test_ending_an_actor_hides_no_other_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_of(monkeypatch, StandIn(error)).kill(None)


def test_ctrl_c_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        cluster_of(monkeypatch, StandIn(KeyboardInterrupt())).got(None)


@pytest.mark.parametrize(
    "error", [ConnectionError("nobody"), ValueError("nonsense"), RuntimeError("other version")]
)
@pytest.mark.parametrize(
    ("address", "sentence"),
    [("auto", "at RAY_ADDRESS auto"), (None, "does not start on this machine")],
)
def test_a_ray_that_does_not_start_is_one_sentence(
    address: str | None, sentence: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=sentence) as told:
        cluster_of(monkeypatch, StandIn(error, init=True))
    assert type(error).__name__ in str(told.value)


def listening(door: str | tuple[str, int]) -> socket.socket:
    end = socket.socket(socket.AF_UNIX if isinstance(door, str) else socket.AF_INET)
    end.bind(door)
    end.listen()
    return end


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:99999"])
def test_where_nobody_answers_ray_is_not_asked_for_minutes(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match="nobody answers"):
        cluster_of(monkeypatch, StandIn(KeyError("asked"), init=True))


@pytest.mark.parametrize("ended", ["raylet_socket_name", "gcs_address"])
def test_a_process_of_ray_that_has_ended_is_noticed_before_ray_is_asked(
    ended: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray ends the program that asks for an object then."""
    monkeypatch.setattr(ray_cluster, "SECONDS_FOR_HEAD", 0.0)
    ends = {
        "raylet_socket_name": listening(str(tmp_path / "raylet")),
        "gcs_address": listening(("127.0.0.1", 0)),
    }
    port = ends["gcs_address"].getsockname()[1]
    doors = {"raylet_socket_name": str(tmp_path / "raylet"), "gcs_address": f"127.0.0.1:{port}"}
    ray: Any = StandIn(KeyError("asked"))
    worker = SimpleNamespace(global_worker=SimpleNamespace(node=SimpleNamespace(**doors)))
    ray._private = SimpleNamespace(worker=worker)
    try:
        cluster = cluster_of(monkeypatch, ray)
        with pytest.raises(KeyError, match="asked"):
            cluster.got(None)
        ends[ended].close()
        for use in USES.values():
            with pytest.raises(RunFolderError, match=r"Ray has ended .*resume the run"):
                use(cluster, ray.handle)
    finally:
        for end in ends.values():
            end.close()


def test_a_head_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([True, False, False, True])
    ray: Any = StandIn(KeyError("asked"))
    node = SimpleNamespace(gcs_address="127.0.0.1:1")
    worker = SimpleNamespace(global_worker=SimpleNamespace(node=node))
    ray._private = SimpleNamespace(worker=worker)
    monkeypatch.setattr(ray_cluster, "_answers", lambda door: next(tries))
    monkeypatch.setattr(ray_cluster, "SECONDS_BETWEEN_TRIES", 0.0)
    with pytest.raises(KeyError, match="asked"):
        cluster_of(monkeypatch, ray).got(None)
    assert list(tries) == []


def test_all_errors_that_ray_has_go_one_of_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    kinds = [
        kind
        for _, kind in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(kind, exceptions.RayError)
    ]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind)
        for name in ("error_msg", "_actor_init_failed", "cause", "msg"):
            vars(error).setdefault(name, None)
        monkeypatch.setattr(kind, "__str__", lambda _: "a\nb")
        ray = StandIn(error)
        monkeypatch.setattr(ray, "exceptions", exceptions, raising=False)
        with pytest.raises((SecureClusterError, TimeoutError)) as told:
            cluster_of(monkeypatch, ray).got(None)
        died = issubclass(kind, (exceptions.RayActorError, exceptions.OutOfMemoryError))
        died |= kind is exceptions.WorkerCrashedError
        assert isinstance(told.value, ActorLostError) is died
        if not isinstance(told.value, TimeoutError):
            assert "resume" in str(told.value)
