"""Guard ratios of times: fail when one of them is twice as bad as its reference.

python -m benchmarks.ratios             measure and print all ratios
python -m benchmarks.ratios --check     return 1 where one is over twice its reference
python -m benchmarks.ratios --update    write the references, benchmarks/results/ratios.csv

Each ratio is what this library takes over what something beside it takes, measured in turn in the
same minute, in processor seconds and on one thread: less is better, and the machine hardly matters.
Two jobs of a sweep over one are the exception: wall-clock time, with a thread for each job.
A ratio that is too large is measured a second time, and its lesser value counts, so that other work
of the machine does not fail the check. What became twice as slow does; what became a tenth slower
is found in the tables of the evidence pages instead.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import table
from benchmarks.costs import own_data, protected_rounds, server_scale, speed, terminal
from benchmarks.grid import script_parser
from securecluster.core.devices import cpu_threads
from securecluster.data import locations
from securecluster.privacy.masking.masks import build
from securecluster.protocols import FedAvg, Hidden

NAME = "ratios"
FACTOR = 2.0  # times its reference, from which a ratio is too large
REPEATS = 5
MASKED_MODEL = "mlp-200"
MASKS = ("permutation", "rotation")
RUNS = 3  # of a whole default run
RUNS_OF_MANY = 2  # of a run of many clients, or of an audit
TINY: Mapping[str, Any] = {"model": "linear", "epochs": 1, "batch_size": 4}
CLIENTS_OF_DPSGD = 4
ROWS, CLIENTS_OF_ROWS = 500_000, 500  # of a table
CLIENTS_OF_HIDDEN = 400
FEW_CLIENTS, MANY_CLIENTS = 1000, 4000
# runs long enough that start and pictures hardly count
SWEEP = ("sweep", "cfl", "--noise", "0", "--seeds", "12", "--rounds", "150", "--quiet")
UPDATE = "python -m benchmarks.ratios --update"


def training(model: str, clients: int) -> list[float]:
    """Return the time of training all clients at once over that of a plain PyTorch loop.

    Args:
        model: a network's name.
        clients: how many.
    """
    batched = speed.cohort(model, clients)
    # a copy, since the plain loop overwrites its parameters
    module = copy.deepcopy(batched.model.module)
    tasks = {
        "batched": partial(speed.train, batched),
        "plain": partial(speed.plain, batched, module),
    }
    shortest = protected_rounds.least(tasks, REPEATS)
    return [shortest["batched"] / shortest["plain"]]


def masks() -> list[float]:
    """Return the time of masking an update and unmasking an average, over that of ten plain steps.

    The masks are a permutation and a rotation. Every call has another map, which a client makes.
    """
    batched = speed.cohort(MASKED_MODEL, 1)
    module = copy.deepcopy(batched.model.module)
    numbers = itertools.count(1)
    rows = torch.randn(1, batched.model.dimension)

    def masked(stage: Any) -> None:
        step = next(numbers)
        stage.inverse(stage.overwrite(rows.clone(), step)[0], step)

    tasks: dict[str, Callable[[], Any]] = {"plain": partial(speed.plain, batched, module)}
    for name in MASKS:
        stage: Any = build(name, batched.model.dimension)[0]
        stage.unlock(bytes(range(32)))
        tasks[name] = partial(masked, stage)
    shortest = protected_rounds.least(tasks, REPEATS)
    return [shortest[name] / shortest["plain"] for name in MASKS]


def dp_sgd() -> list[float]:
    """Return the time of DP-SGD with exact noise over that of opacus."""
    shortest = protected_rounds.dp_sgd(CLIENTS_OF_DPSGD, REPEATS)
    return [shortest["DP-SGD"] / shortest[protected_rounds.OPACUS]]


def secure_sums() -> list[float]:
    """Return the time of a round with secure sums over that of one with plain sums."""
    shortest = protected_rounds.secure_sums("mlp-32", REPEATS)
    return [shortest["secagg"] / shortest["plain"]]


def secure_round(model: str, clients: int) -> list[float]:
    """Return the time of a round with secure sums over that of one with plain sums.

    Args:
        model: a network's name.
        clients: how many.
    """
    shortest = protected_rounds.secure_sums(model, RUNS_OF_MANY, clients)
    return [shortest["secagg"] / shortest["plain"]]


def neighbouring_sizes() -> list[float]:
    """Return the time of a run with secure sums of 200 clients over that of 202."""
    times = []
    for clients in (200, 202):
        run = FedAvg(rounds=2, aggregation="secagg", **TINY)
        times.append(min(protected_rounds.whole_run(run, clients)[0] for _ in range(RUNS_OF_MANY)))
    return [times[0] / times[1]]


def hidden_sums() -> list[float]:
    """Return the time of a round of `hidden` of 400 clients with secure sums, over plain sums."""
    times = {"secagg": math.inf, "plain": math.inf}
    # the least of several, of which the first imports what the others have
    for _ in range(RUNS_OF_MANY):
        for aggregation in times:
            run = Hidden(rounds=1, k=2, aggregation=aggregation, **TINY)
            seconds, _ = protected_rounds.whole_run(run, CLIENTS_OF_HIDDEN)
            times[aggregation] = min(times[aggregation], seconds)
    return [times["secagg"] / times["plain"]]


def key_bytes() -> list[float]:
    """Return the bytes of keys that each of 420 clients is sent, over those of 210."""
    shares = []
    for clients in (420, 210):
        run = FedAvg(rounds=1, aggregation="secagg", **TINY)
        _, counted = protected_rounds.whole_run(run, clients)
        shares.append(counted["by_message"]["sum_keys"]["down"] / clients)
    return [shares[0] / shares[1]]


def exact_noise() -> list[float]:
    """Return the times of exact noise, by numpy and compiled, over that of torch's Gaussians.

    The second is NaN, and not compared, where numba is not installed.
    """
    shortest = protected_rounds.noise(20, 50_890, REPEATS)
    return [shortest[name] / shortest["randn"] for name in ("numpy", "compiled")]


def norms() -> list[float]:
    """Return the time of the check of the updates' norms over that of training them."""
    shortest = protected_rounds.norms(REPEATS)
    return [shortest["norms"] / shortest[protected_rounds.TRAINING]]


def growth() -> list[float]:
    """Return the times of masked calls of many clients over those of few, a client each.

    They are 1 where times grow with the number of clients, and 4 where they grow with its square:
    of the first call, which has the key agreement, and of the later ones.
    """
    times_of_few = server_scale.seconds_of_calls("permutation", FEW_CLIENTS)
    times_of_many = server_scale.seconds_of_calls("permutation", MANY_CLIENTS)
    times = MANY_CLIENTS / FEW_CLIENTS
    pairs = zip(times_of_few, times_of_many, strict=True)
    first, *later = (long / (times * short) for short, long in pairs)
    return [first, statistics.median(later)]


def own_table() -> list[float]:
    """Return the time of making a federation of a parquet file over that of pyarrow's read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.parquet"
        own_data.write_file(path, ROWS, CLIENTS_OF_ROWS)
        read, ours = own_data.least_seconds(path, REPEATS)
    return [ours / read]


def commands(names: tuple[str, str], repeats: int) -> list[float]:
    """Return the time of a command over that of another one.

    Args:
        names: of both, in `benchmarks.costs.terminal.CASES`.
        repeats: runs of each.
    """
    shortest = dict.fromkeys(names, float("inf"))
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name in reversed(names):  # an audit reads the run
                seconds = terminal.once(terminal.CASES[name], Path(folder))
                shortest[name] = min(shortest[name], seconds)
    ours, other = names
    return [shortest[ours] / shortest[other]]


def two_jobs() -> list[float]:
    """Return the wall-clock time of a sweep with two jobs over that with one.

    It is not a number on a machine with one core.
    """
    if (os.cpu_count() or 1) < 2:
        return [math.nan]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for jobs in ("2", "1"):
            command = (*terminal.COMMAND, *SWEEP, "--jobs", jobs, "--out", f"jobs{jobs}")
            begun = time.monotonic()
            terminal.once(command, Path(folder))
            seconds.append(time.monotonic() - begun)
    return [seconds[0] / seconds[1]]


def private_signature() -> list[float]:
    """Return the time of two rounds of `signature` on MNIST at ε = 4, over those without noise.

    It is not a number where no folder of data sets has MNIST: nothing is downloaded here.
    """
    data_folder = locations.folder()
    if data_folder is None or not (data_folder / "mnist").is_dir():
        return [math.nan]
    command = (*terminal.COMMAND, "run", "signature", "--data", "mnist", "--rounds", "2")
    with tempfile.TemporaryDirectory() as folder:
        private, plain = (
            terminal.once((*command, *noise, "--quiet", "--out", f"run{i}"), Path(folder))
            for i, noise in enumerate((("--target-epsilon", "4"), ()))
        )
    return [private / plain]


# what is measured together: the names of its ratios, and the function that returns them
MEASURES: Mapping[tuple[str, ...], Callable[[], Sequence[float]]] = {
    ("training 20 clients' MLPs at once, over a plain loop",): partial(training, "mlp-200", 20),
    ("training 4 clients' CNNs at once, over a plain loop",): partial(training, "cnn-briggs", 4),
    (
        "a permutation of an update and back, over ten plain steps",
        "a rotation of an update and back, over ten plain steps",
    ): masks,
    ("DP-SGD with exact noise, over opacus",): dp_sgd,
    ("a round with secure sums, over one with plain sums",): secure_sums,
    ("a round with secure sums of 30 clients' 159,010 numbers, over a plain one",): partial(
        secure_round, "mlp-200", 30
    ),
    ("a round with secure sums of 100 clients' 25,450 numbers, over a plain one",): partial(
        secure_round, "mlp-32", 100
    ),
    ("a run with secure sums of 200 clients, over 202",): neighbouring_sizes,
    ("a round of hidden with secure sums of 400 clients, over a plain one",): hidden_sums,
    ("bytes of keys sent to each of 420 clients, over 210",): key_bytes,
    (
        "exact noise, over torch.randn",
        "exact noise compiled by numba, over torch.randn",
    ): exact_noise,
    ("the check of updates' norms, over their training",): norms,
    (
        "a client's key agreement among 4,000 clients, over among 1,000",
        "a client's masked call among 4,000 clients, over among 1,000",
    ): growth,
    ("a federation of a parquet file, over pyarrow's read",): own_table,
    ("list, over --help",): partial(commands, ("list", terminal.BASE), REPEATS),
    ("run cfl, over import torch",): partial(commands, ("run cfl", terminal.TORCH), RUNS),
    ("the audit of a run, over the run",): partial(commands, ("audit", "run cfl"), RUNS_OF_MANY),
    ("a sweep with two jobs, over one, wall-clock time",): two_jobs,
    ("signature on MNIST at ε = 4 for two rounds, over without noise",): private_signature,
}


def measured(
    names: Sequence[str], measure: Callable[[], Sequence[float]], limits: Mapping[str, float]
) -> dict[str, float]:
    """Return ratios by name: the lesser of two values where the first is over its limit.

    Args:
        names: of the ratios.
        measure: returns them in this order.
        limits: by name; a ratio without one is measured once.
    """
    ratios = dict(zip(names, measure(), strict=True))
    if any(ratio > limits.get(name, ratio) for name, ratio in ratios.items()):
        again = zip(names, measure(), strict=True)
        ratios = {name: min(ratios[name], ratio) for name, ratio in again}
    return ratios


def complaints(ratios: Mapping[str, float], references: Mapping[str, float]) -> list[str]:
    """Return a sentence for each ratio that is too large, or that has no reference.

    Args:
        ratios: as measured, by name.
        references: by name.
    """
    sentences = []
    for name, ratio in ratios.items():
        if name not in references:
            sentences.append(f"{name}: there is no reference: write one with {UPDATE}")
        elif ratio > FACTOR * references[name]:
            sentences.append(
                f"{name}: the ratio is {ratio:.3g}, over {FACTOR:g} times its reference "
                f"{references[name]:.3g}: find what became slow, or, where it is meant, write the "
                f"references with {UPDATE}"
            )
    for name in references:
        if name not in ratios:
            sentences.append(f"{name}: nothing measures it: write the references with {UPDATE}")
    return sentences


def read_references() -> dict[str, float]:
    """Return the references by name; none where there is no file of them."""
    path = table.RESULTS / f"{NAME}.csv"
    if not path.exists():
        return {}
    return {row["ratio"]: float(row["reference"]) for row in table.read(path)}


def _with_others(ratios: Mapping[str, float]) -> dict[str, float]:
    """Return ratios and the references of those that were not measured, in the table's order."""
    known = read_references() | {name: x for name, x in ratios.items() if not math.isnan(x)}
    return {name: known[name] for names in MEASURES for name in names if name in known}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the ratios; check them, or write them.

    Args:
        argv: arguments of the command line; None takes the process's own.

    Returns:
        1 where the check finds a ratio too large, else 0.
    """
    parser = script_parser(__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="return 1 where a ratio is too large")
    choice.add_argument("--update", action="store_true", help="write the references")
    parser.add_argument("--only", default="", help="measure or check ratios of such names alone")
    options = parser.parse_args(argv)
    references = {} if options.update else read_references()
    limits = {}
    if options.check:
        limits = {name: FACTOR * reference for name, reference in references.items()}
    # as opacus has it
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands
    ratios: dict[str, float] = {}
    with cpu_threads(1):
        chosen = [names for names in MEASURES if any(options.only in name for name in names)]
        for names in chosen:
            measure = MEASURES[names]
            measured_ratios = measured(names, measure, limits)
            for name, ratio in measured_ratios.items():
                print(
                    f"{ratio:8.3f} (reference {references.get(name, 'none')}): {name}", flush=True
                )
            ratios |= measured_ratios
    if options.only:
        references = {name: references[name] for name in ratios if name in references}
    if options.update:
        ratios = _with_others(ratios)
        rows = [{"ratio": name, "reference": f"{ratio:.3g}"} for name, ratio in ratios.items()]
        print(table.write(NAME, rows))
    if not options.check:
        return 0
    sentences = complaints(ratios, references)
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
