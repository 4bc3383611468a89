"""Entry point of `python -m securecluster` and of the console script."""

from __future__ import annotations

import gc
import sys


def entry() -> None:
    """Run the command line in this process, and exit with its status."""
    try:
        from securecluster.core import stops

        # signals are handled from here on: loading the rest takes long enough to be interrupted
        stops.prepare_process()
        with stops.lost_by_nobody():
            from securecluster.cli.main import main
            from securecluster.core.lazy_torch import prepare

            prepare()
        code = main(sys.argv[1:])
    except KeyboardInterrupt as stop:  # while the program was still being loaded
        print("securecluster: stopped", file=sys.stderr)
        sys.exit(getattr(stop, "code", 130))
    # what Python would search for garbage while it ends, some tenth of a short run, goes anyway
    gc.freeze()
    sys.exit(stops.flush() or code)


if __name__ == "__main__":
    entry()
