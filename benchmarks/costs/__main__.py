"""Make every number of the pages on speed, scale and costs again, in one run.

python -m benchmarks.costs [--only NAMES …]

Each part runs in a process of its own with one thread, one after the other, so let nothing run
beside them. The tables of the pages are then written anew. Runs over Flower, which keep a machine
busy for an hour, are apart: `benchmarks.apps.over_flower` and `benchmarks.apps.scale`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

PARTS: Mapping[str, tuple[str, ...]] = {
    "ratios": ("benchmarks.ratios", "--update"),
    "sketches": ("benchmarks.costs.server_scale", "sketches"),
    "protocols": ("benchmarks.costs.server_scale", "protocols"),
    "protections": ("benchmarks.costs.protections",),
    "grid_noise": ("benchmarks.costs.grid_noise",),
    "exchanges": ("benchmarks.costs.exchanges",),
    "tables": ("benchmarks.evidence",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, and print how long each took.

    Args:
        argv: arguments of the command line; None takes the process's own.

    Returns:
        1 where a part failed, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(argv)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    failed = []
    for name in options.only:
        begun = time.monotonic()
        status = subprocess.call((sys.executable, "-m", *PARTS[name]), env=environment)
        print(f"--- {name}: {time.monotonic() - begun:.0f} s", flush=True)
        if status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
