"""Work on parts of a tensor in threads, in each of which torch uses one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from securecluster.core.lazy_torch import torch

P = TypeVar("P")


def each_in_a_thread(work: Callable[[P], object], arguments: Sequence[P]) -> None:
    """Call a function with each argument, all at once.

    Args:
        work: the function; it calls operations of torch, which leave the interpreter to others.
        arguments: its arguments, about as many as torch has threads.

    Raises:
        Exception: what the function raised first.
    """
    if len(arguments) <= 1:
        for argument in arguments:
            work(argument)
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(arguments), initializer=lambda: torch.set_num_threads(1))
    try:
        futures = [pool.submit(work, argument) for argument in arguments]
        for future in futures:
            future.result()
    finally:
        pool.shutdown()
        # the number is the process's, not the thread's, for threads that start later
        torch.set_num_threads(threads)
