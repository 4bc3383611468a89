"""The command: `python -m benchmarks.gpu --minutes 9 --out DIR`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from benchmarks import gpu
from benchmarks.gpu.report import Results
from benchmarks.gpu.watchdog import watch
from securecluster.errors import SecureClusterError, UsageError

WORKER = [sys.executable, "-m", "benchmarks.gpu.worker"]


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options.

    Args:
        argv: the command line without the program's name.

    Raises:
        UsageError: minutes that are none, or a folder with something in it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="the time that all of it may take"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="an empty or new folder for the results"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    options = parser.parse_args(argv)
    if not (math.isfinite(options.minutes) and options.minutes > 0):
        raise UsageError(
            f"--minutes {options.minutes} is no time: give a positive number of minutes"
        )
    if options.out.exists() and not _is_empty_folder(options.out):
        raise UsageError(f"{options.out} exists and is not empty: give --out a new folder")
    return options


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def main(argv: list[str]) -> int:
    """Run the command and return its exit code.

    It is 0 if all checks that ran passed, 1 if one failed, and 2 if the command cannot start.

    Args:
        argv: the command line without the program's name.
    """
    began = time.monotonic()
    try:
        options = parse(argv)
        results = Results(options.out, lambda line: print(line, flush=True))
        elapsed = time.monotonic() - began  # parsing counts, too
        seconds = 60 * options.minutes - elapsed
        watch(WORKER, options.device, seconds, results)
    except SecureClusterError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: {options.out} holds what was done until then", file=sys.stderr)
        return 130
    print(f"results: {options.out / 'summary.md'}")
    if results.failed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
