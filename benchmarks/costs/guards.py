"""Measure what the bookkeeping of privacy costs: receipts, notes of reads, relays and targets.

python -m benchmarks.costs.guards [--clients 200] [--rounds 3] [--pairs 7] [--cases …]

Clients have few images and a linear model, so that bookkeeping shows. "bytes" compares each reply's
frame with the same frame without receipts. "seconds" takes processor seconds of the server's loop
and its clients, with each part of the bookkeeping and without it, in pairs that alternate in one
process, and the share of the part's own methods in the run with it. What the history measures after
each round is left out. "dry_runs" are those in which `target_epsilon` learns what a client will
release, timed as if it were the first such run.

Run with OMP_NUM_THREADS=1: several threads add up to more processor time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.grid import as_told, script_parser
from benchmarks.table import SEEDED, write
from securecluster import Federation, LabelSwap
from securecluster.core.lazy_torch import torch
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Response, reply_header
from securecluster.messaging.receipts import Receipts
from securecluster.messaging.transcript import Transcript
from securecluster.parties import dry_run
from securecluster.parties.dry_run import run_releases
from securecluster.privacy.dp.target import Target
from securecluster.protocols import CFL, CLoVE, ClusteringProtocol, FedAvg, Hidden, OneShot
from securecluster.protocols.common.observer import Observer
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.relays import Gathered
from securecluster.runtime.release_guard import ReleaseGuard, Traces
from securecluster.runtime.release_target import ReleaseTarget
from securecluster.training.data_access import DataAccess, Reads

SAMPLES = 6  # of each client: digits has 1797, for up to 200 clients
PRIVATE: Mapping[str, Any] = {"clip": 1.0, "target_epsilon": 4.0}
CASES: Mapping[str, partial[Any]] = {
    "fedavg client noise": partial(FedAvg, **PRIVATE),
    "fedavg DP-SGD": partial(FedAvg, **PRIVATE, dp_unit="example"),
    "clove noisy losses": partial(CLoVE, **PRIVATE, k=2),
    # the target gives Gram matrices and updates noise of one multiplier
    "oneshot gram noise": partial(OneShot, **PRIVATE, tasks=2, vectors=4),
    "cfl masked": partial(CFL, mask="permutation"),
    "hidden": partial(Hidden, **PRIVATE, k=2, aggregation="plain"),
}
NOTHING = "nothing"
RECEIPTS = "receipts"
READS = "reads"
RELAYS = "relays"
TARGET = "target"
# part -> what is left out of both runs of a pair. Receipts follow from reads, so those of a run
# without notes of reads would be others. Pairs of equal runs show what the ratios leave open.
PARTS: Mapping[str, tuple[str, ...]] = {
    NOTHING: (),
    RECEIPTS: (),
    READS: (RECEIPTS,),
    RELAYS: (),
    TARGET: (),
}
# part -> the methods that it consists of, whose own time a run with it takes, too
METHODS: Mapping[str, tuple[tuple[type, str], ...]] = {
    NOTHING: (),
    RECEIPTS: ((ReleaseGuard, "receipts"),),
    READS: ((DataAccess, "read"),),
    RELAYS: ((Gathered, "remember"), (Gathered, "check")),
    # of clients, and of the server
    TARGET: ((ReleaseTarget, "reserve"), (Target, "admit")),
}
# of these only entry and exit count
CONTEXTS: Mapping[str, tuple[tuple[type, str], ...]] = {
    READS: ((DataAccess, "during"), (DataAccess, "closed"), (DataAccess, "train"))
}
ALL = "all"  # methods of a run

# by method and clients
Memory = dict[tuple[str, tuple[int, ...]], list[Receipts]]


def federation_of(clients: int) -> Federation:
    """Return clients in two clusters that swap labels.

    Args:
        clients: how many.
    """
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=clients, samples=SAMPLES, seed=0
    )


def protocol_of(case: str, rounds: int) -> ClusteringProtocol:
    """Return the protocol of a case.

    Args:
        case: one of `CASES`.
        rounds: of a run.
    """
    made = CASES[case]
    training = {"model": "linear", "rounds": rounds, "epochs": 1, "batch_size": SAMPLES}
    protocol: ClusteringProtocol = as_told(made.func, {**made.keywords, **training})
    return protocol


# --- bytes ---


@dataclass
class Tally:
    """Replies of one client method, and their bytes.

    Args:
        replies: how many.
        up: bytes of their frames.
        receipts: bytes of these that receipts add.
    """

    replies: int = 0
    up: int = 0
    receipts: int = 0


def frame_bytes(call: Call, response: Response) -> Iterator[tuple[int, int]]:
    """Yield the length of each reply's frame, with its receipts and without them.

    Args:
        call: the requests.
        response: the replies that arrived.
    """
    positions = {client: position for position, client in enumerate(call.to)}
    for position, client in enumerate(response.ids):
        request = call.header(positions[client])
        encode = partial(wire.encode, reply_header(request), response.reply, position)
        receipts = response.receipts_at(position)
        with_receipts = encode(receipts)
        without_receipts = encode()
        yield len(with_receipts), len(without_receipts)


@contextmanager
def tallied() -> Iterator[dict[str, Tally]]:
    """Count the bytes of all replies within the context, by method."""
    tallies: dict[str, Tally] = {}
    record = Transcript.record

    def counting(self: Transcript, call: Call, answer: Response) -> None:
        record(self, call, answer)
        if answer.reply is None:
            return
        tally = tallies.setdefault(call.method, Tally())
        for complete, bare in frame_bytes(call, answer):
            tally.replies += 1
            tally.up += complete
            tally.receipts += complete - bare

    with patch.object(Transcript, "record", counting):
        yield tallies


def bytes_of(case: str, federation: Federation, rounds: int) -> list[dict[str, Any]]:
    """Return the lines of one case: of each method with receipts, and of all methods.

    Args:
        case: one of `CASES`.
        federation: the clients and their data.
        rounds: of the run.
    """
    with tallied() as tallies:
        fitted = protocol_of(case, rounds).fit(federation, SEEDED)
    up = fitted.bytes_["up"]
    all_methods = Tally()
    for tally in tallies.values():
        all_methods.replies += tally.replies
        all_methods.up += tally.up
        all_methods.receipts += tally.receipts
    # the run counts its bytes from shapes, and these are of encoded frames
    assert all_methods.up == up
    in_order = sorted(tallies.items())
    with_receipts = {name: tally for name, tally in in_order if tally.receipts}
    lines = []
    for method, tally in {**with_receipts, ALL: all_methods}.items():
        line = {
            "case": case,
            "method": method,
            "clients": len(federation),
            "rounds": rounds,
            "replies": tally.replies,
            "frame_bytes": round(tally.up / tally.replies, 1),
            "receipt_bytes": round(tally.receipts / tally.replies, 1),
            "share_of_up": round(tally.receipts / up, 5),
        }
        lines.append(line)
    return lines


# --- seconds ---


@contextmanager
def without(components: Sequence[str], memory: Memory) -> Iterator[None]:
    """Leave parts of the bookkeeping out within the context.

    Args:
        components: some of `PARTS`.
        memory: receipts of earlier calls.
    """
    with ExitStack() as stack:
        if RECEIPTS in components:
            stack.enter_context(patch.object(ReleaseGuard, "receipts", _remembered(memory)))
        if READS in components:
            stack.enter_context(
                patch.multiple(
                    DataAccess,
                    during=lambda *_, **__: nullcontext(Reads()),
                    read=lambda *_: None,
                    closed=lambda *_: nullcontext(),
                    train=lambda *_: nullcontext(),
                )
            )
        if RELAYS in components:
            stack.enter_context(
                patch.multiple(Gathered, remember=lambda *_: None, check=lambda *_: None)
            )
        if TARGET in components:
            # the noise is still the one that the target needs
            stack.enter_context(patch.object(PrivacyOptions, "holds_target", False))
        yield


def _remembered(memory: Memory) -> Callable[..., list[Receipts]]:
    """Return a method that returns the receipts that a call of the same clients had first.

    Args:
        memory: receipts of earlier calls.
    """
    receipts = ReleaseGuard.receipts

    def first(
        self: ReleaseGuard, traces: Traces, reply: Any, context: CallContext
    ) -> list[Receipts]:
        key = (traces.method, context.ids)
        if key not in memory:
            memory[key] = receipts(self, traces, reply, context)
        return memory[key]

    return first


@dataclass
class Watch:
    """Processor seconds of one run.

    Args:
        loop: of the server's loop and its clients.
        measured: of these, what the history measures.
        inside: of these, what one part of the bookkeeping takes.
    """

    loop: float = 0.0
    measured: float = 0.0
    inside: float = 0.0
    _running: bool = False
    _depth: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the run, without what the history measures."""
        return self.loop - self.measured

    @contextmanager
    def watching(self, protocol_class: type[ClusteringProtocol], component: str) -> Iterator[None]:
        """Take the time of a run within the context.

        Args:
            protocol_class: class of the protocol that runs.
            component: one of `PARTS`, whose own time is taken.
        """
        run_server = protocol_class.run_server
        evaluate = Observer.evaluate

        @wraps(run_server)  # with its annotation, which names the state's class
        def timed_loop(server: Any, net: Any, run: Any) -> Any:
            # what earlier runs left behind is not collected in this one
            gc.collect()
            self._running = True
            start = time.process_time()
            state = run_server(server, net, run)
            self.loop += time.process_time() - start
            self._running = False
            return state

        def timed_scores(observer: Any, client: Any, state: Any) -> Any:
            start = time.process_time()
            scores = evaluate(observer, client, state)
            self.measured += time.process_time() - start
            return scores

        with ExitStack() as stack:
            stack.enter_context(patch.object(protocol_class, "run_server", timed_loop))
            stack.enter_context(patch.object(Observer, "evaluate", timed_scores))
            for owner, name in METHODS[component]:
                timed = self._timed(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
            for owner, name in CONTEXTS.get(component, ()):
                timed = self._timed_context(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
            yield

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Add the time within the context, in the loop; what is nested in it counts once."""
        self._depth += 1
        start = time.process_time()
        try:
            yield
        finally:
            self._depth -= 1
            if self._running and not self._depth:
                self.inside += time.process_time() - start

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method whose time is taken."""

        def timed(*arguments: Any) -> Any:
            with self._clock():
                return method(*arguments)

        return timed

    def _timed_context(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that returns a context, of which the time of entry and exit is taken."""

        @contextmanager
        def timed(*arguments: Any, **named: Any) -> Iterator[Any]:
            with ExitStack() as stack:
                with self._clock():
                    value = stack.enter_context(method(*arguments, **named))
                yield value
                with self._clock():
                    stack.close()

        return timed


def watched(
    protocol: ClusteringProtocol, federation: Federation, component: str = NOTHING
) -> Watch:
    """Return the processor seconds of a run.

    Args:
        protocol: the method.
        federation: the clients and their data.
        component: one of `PARTS`, whose own time is taken.
    """
    watch = Watch()
    with watch.watching(type(protocol), component):
        protocol.fit(federation, SEEDED)
    return watch


@dataclass
class Pairs:
    """Runs with a part of the bookkeeping, and without it.

    Args:
        kept: with the part, one for each pair.
        left_out: without it.
    """

    kept: list[Watch] = field(default_factory=list)
    left_out: list[Watch] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Seconds with the part over those without it."""
        pairs = zip(self.kept, self.left_out, strict=True)
        return [with_part.seconds / left_out.seconds for with_part, left_out in pairs]

    @property
    def shares(self) -> list[float]:
        """Shares of the part's own methods in the seconds of the runs with it."""
        return [watch.inside / watch.seconds for watch in self.kept]


def compare(run: Callable[[Sequence[str], str], Watch], component: str, count: int) -> Pairs:
    """Return pairs of runs, of which each begins with the kind that the last one ended with.

    Args:
        run: returns the seconds of a run without some parts, and those of a part's own methods.
        component: one of `PARTS`.
        count: number of pairs.
    """
    pairs = Pairs()
    common = PARTS[component]
    for k in range(count):
        if k % 2:
            pairs.left_out.append(run((*common, component), NOTHING))
            pairs.kept.append(run(common, component))
        else:
            pairs.kept.append(run(common, component))
            pairs.left_out.append(run((*common, component), NOTHING))
    return pairs


def seconds_of(
    case: str, federation: Federation, rounds: int, count: int
) -> tuple[list[dict[str, Any]], float]:
    """Measure the parts of the bookkeeping in one case.

    Args:
        case: one of `CASES`.
        federation: the clients and their data.
        rounds: of each run.
        count: pairs of runs for each part.

    Returns:
        The line of each part, and the processor seconds of a round with all of them.
    """
    has_target = protocol_of(case, rounds).privacy.holds_target
    memory: Memory = {}

    def run(omitted: Sequence[str], timed_component: str) -> Watch:
        with without(omitted, memory):
            return watched(protocol_of(case, rounds), federation, timed_component)

    # imports are no part of the time, and receipts are remembered
    run([RECEIPTS], NOTHING)
    lines = []
    complete: list[float] = []
    for component, common in PARTS.items():
        if component == TARGET and not has_target:
            continue
        pairs = compare(run, component, count)
        seconds_with = [watch.seconds for watch in pairs.kept]
        seconds_without = [watch.seconds for watch in pairs.left_out]
        if not common:
            complete += seconds_with
        line = {
            "case": case,
            "part": component,
            "clients": len(federation),
            "rounds": rounds,
            "pairs": count,
            "seconds_with": round(statistics.median(seconds_with) / rounds, 4),
            "seconds_without": round(statistics.median(seconds_without) / rounds, 4),
            "ratio": round(statistics.median(pairs.ratios), 4),
            "ratio_min": round(min(pairs.ratios), 4),
            "ratio_max": round(max(pairs.ratios), 4),
            "share": round(statistics.median(pairs.shares), 6),
        }
        lines.append(line)
    return lines, statistics.median(complete) / rounds


# --- dry runs ---


def dry_run_seconds(protocol: ClusteringProtocol, federation: Federation) -> float:
    """Return the processor seconds in which a target learns what a client will release.

    Args:
        protocol: the method, with a target.
        federation: the clients and their data.
    """
    with patch.dict(dry_run._KNOWN, clear=True):
        gc.collect()
        start = time.process_time()
        run_releases(protocol, federation.facts, len(federation))
        return time.process_time() - start


def dry_run_of(
    case: str, federation: Federation, rounds: int, count: int, round_seconds: float
) -> dict[str, Any]:
    """Return the line of one case.

    Args:
        case: one of `CASES`.
        federation: the clients and their data.
        rounds: of a run.
        count: repetitions.
        round_seconds: processor seconds of a round of a real run.
    """
    protocol = protocol_of(case, rounds)
    seconds = [dry_run_seconds(protocol, federation) for _ in range(count)]
    median = statistics.median(seconds)
    return {
        "case": case,
        "clients": len(federation),
        "rounds": rounds,
        "runs": 1 + len(protocol.dry_runs()),
        "repetitions": count,
        "seconds": round(median, 4),
        "seconds_min": round(min(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "round_seconds": round(round_seconds, 4),
        "rounds_worth": round(median / round_seconds, 3),
    }


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Measure, and write the CSV files.

    Args:
        argv: the arguments; those of the command line by default.
    """
    parser = script_parser(__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args(argv)
    if options.pairs < 1:
        parser.error("--pairs is at least 1")
    torch.set_num_threads(1)
    federation = federation_of(options.clients)
    sizes: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    dry_runs: list[dict[str, Any]] = []
    for case in options.cases:
        sizes += bytes_of(case, federation, options.rounds)
        lines, of_round = seconds_of(case, federation, options.rounds, options.pairs)
        times += lines
        if protocol_of(case, options.rounds).privacy.holds_target:
            line = dry_run_of(case, federation, options.rounds, options.pairs, of_round)
            dry_runs.append(line)
        print(f"{case}: {of_round:.3f} s a round", flush=True)
    written = [write("guards_bytes", sizes), write("guards_seconds", times)]
    if dry_runs:
        written.append(write("guards_dry_runs", dry_runs))
    return written


if __name__ == "__main__":
    for path in main():
        print(path)
