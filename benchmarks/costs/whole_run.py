"""Measure the processor seconds of a whole run, over those of the training in it.

python -m benchmarks.costs.whole_run [--data mnist] [--rounds 40]

The run is `securecluster run cfl --quiet` with its files and pictures, on one thread and in this
process, whose imports count; training is what `LocalTrainer.train` takes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid import script_parser
from benchmarks.table import write


def measured(data: str, rounds: int) -> dict[str, Any]:
    """Run once in this process, and return the line of the table.

    Args:
        data: name of the data set.
        rounds: of the run.
    """
    # not at the top of the module: these imports are part of the run
    from securecluster.cli.main import main as run_command
    from securecluster.core.devices import cpu_threads
    from securecluster.training.local_trainer import LocalTrainer

    train = LocalTrainer.train
    seconds = []

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        updates = train(*arguments, **options)
        seconds.append(time.process_time() - start)
        return updates

    LocalTrainer.train = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, cpu_threads(1):
        out = str(Path(folder) / "run")
        command = ["run", "cfl", "--quiet", "--data", data, "--rounds", str(rounds), "--out", out]
        status = run_command(command)
    LocalTrainer.train = train  # type: ignore[method-assign]
    if status:
        raise RuntimeError(f"the run ended with status {status}")
    # since the process began
    process_seconds = time.process_time()
    training = sum(seconds)
    return {
        "data": data,
        "rounds": rounds,
        "cpu_seconds": round(process_seconds, 2),
        "training_cpu_seconds": round(training, 2),
        "over_training": round(process_seconds / training, 3),
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, print and write the table.

    Args:
        argv: arguments of the command line; None takes the process's own.
    """
    parser = script_parser(__doc__)
    parser.add_argument("--data", default="mnist", help="the data set")
    parser.add_argument("--rounds", type=int, default=40, help="of the run")
    options = parser.parse_args(argv)
    row = measured(options.data, options.rounds)
    print(row)
    return write("whole_run", [row])


if __name__ == "__main__":
    print(main())
