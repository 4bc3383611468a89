"""`python -m securecluster.benchmarks.peers`."""

import sys

from securecluster.benchmarks.peers.run import main

if __name__ == "__main__":
    sys.exit(main())
