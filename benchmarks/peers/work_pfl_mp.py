"""Train by Apple's pfl on as many processes as there are cores, one thread each.

Users are distributed over the processes, and sums are all-reduced. The process that the driver
starts is rank 0 and communicates with it; it starts the others, which wait for rank 0 before each
round. torchrun does the same, except that here the processes meet at a file instead of a port that
is open to the network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .work import Options, options, processes

MEETING = "SECURECLUSTER_PEERS_MEETING"


def join(arguments: Options, rank: int) -> None:
    """Run as one of the processes of a group.

    pfl joins the group when it is imported, if torchrun's variables are there.

    Args:
        arguments: of the worker.
        rank: of this process; rank 0 has the pipe to the driver.
    """
    size = processes(arguments.device)
    meet = torch.distributed.init_process_group
    # torchrun's variables, which pfl reads when it is imported; gloo on the loopback interface
    os.environ.update(
        TORCHELASTIC_RUN_ID="peers",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        GLOO_SOCKET_IFNAME="lo",
    )

    def group(backend: str) -> None:
        """Join by gloo, whatever the backend: nccl refuses several processes on one GPU."""
        meeting = f"file://{os.environ[MEETING]}"
        meet("gloo", init_method=meeting, rank=rank, world_size=size)

    torch.distributed.init_process_group = group  # type: ignore[assignment]
    # imported after the variables and the group are in place
    from .work_pfl import main

    main(arguments)


def lead(arguments: Options) -> None:
    """Start the other processes, and be rank 0."""
    folder = Path(tempfile.mkdtemp())
    os.environ[MEETING] = str(folder / "meeting")
    for rank in range(1, processes(arguments.device)):
        command = [sys.executable, "-m", "peers.work_pfl_mp", *sys.argv[1:]]
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    join(arguments, 0)


if __name__ == "__main__":
    if MEETING in os.environ:
        join(options(), int(os.environ["RANK"]))
    else:
        lead(options())
