"""Apple's pfl on as many processes as there are cores, one thread each: the users are shared out and the sums all-reduced (gloo or nccl).

The process that the driver starts is rank 0 and talks to it; it starts the others, which wait for its word before each round. As torchrun
would do it, except that the processes meet at a file instead of a port that is open to the network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from .work import options

MEETING = "SECURECLUSTER_PEERS_MEETING"


def join(rank: int, processes: int) -> None:
    """Be one of them: pfl joins the group when it is imported, if torchrun's variables are there."""
    os.environ.update(TORCHELASTIC_RUN_ID="peers", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group = partial(
        torch.distributed.init_process_group, init_method=f"file://{os.environ[MEETING]}", rank=rank, world_size=processes
    )
    from .work_pfl import main

    main(options())


def lead() -> None:
    """Start the others, and be rank 0."""
    processes = os.cpu_count() or 1
    os.environ[MEETING] = str(Path(tempfile.mkdtemp()) / "meeting")
    for rank in range(1, processes):
        command = [sys.executable, "-m", "peers.work_pfl_mp", *sys.argv[1:]]
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    join(0, processes)


if __name__ == "__main__":
    if MEETING in os.environ:
        join(int(os.environ["RANK"]), os.cpu_count() or 1)
    else:
        lead()
