"""`python -m securecluster`, and the console script."""

from __future__ import annotations

import sys


def entry() -> None:
    """Run the command line in this process, and exit."""
    try:
        from securecluster.app import stops

        stops.prepare_process()
        from securecluster.app.cli import main
        from securecluster.core.lazy_torch import prepare

        prepare()
        code = main(sys.argv[1:])
    except KeyboardInterrupt as stop:  # while the program was still being loaded
        print("securecluster: stopped", file=sys.stderr)
        code = getattr(stop, "code", 130)
    sys.exit(stops.flush() or code)


if __name__ == "__main__":
    entry()
