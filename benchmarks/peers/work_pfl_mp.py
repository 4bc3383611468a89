"""Apple's pfl on as many processes as there are cores, one thread each: the users are shared out and the sums all-reduced (gloo or nccl).

This process is rank 0 and talks to the driver; it starts the others, which wait for its word before each round.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from .work import options


def free_port() -> int:
    """A port on the loopback that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """What torchrun would set, without its own process in between."""
    processes = os.cpu_count() or 1
    os.environ.update(TORCHELASTIC_RUN_ID="peers", WORLD_SIZE=str(processes), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    for rank in range(1, processes):
        mine = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "peers.work_pfl", *sys.argv[1:]]
        subprocess.Popen(command, env=mine, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.environ.update(RANK="0", LOCAL_RANK="0")
    from .work_pfl import main as work  # pfl joins the group when it is imported

    work(options())


if __name__ == "__main__":
    main()
