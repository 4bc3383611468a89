"""Work on parts of a tensor in threads, in each of which torch uses one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from securecluster.core.lazy_torch import torch

P = TypeVar("P")


def each_in_a_thread(work: Callable[[P], object], parts: Sequence[P]) -> None:
    """Call a function for each part, all at once.

    Args:
        work: the function; it calls operations of torch, which leave the interpreter to others.
        parts: its arguments, about as many as torch has threads.

    Raises:
        Exception: what the function raised first.
    """
    if len(parts) <= 1:
        for part in parts:
            work(part)
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(parts), initializer=lambda: torch.set_num_threads(1))
    try:
        futures = [pool.submit(work, part) for part in parts]
        for future in futures:
            future.result()
    finally:
        pool.shutdown()
        # the number is the process's, not the thread's, for threads that start later
        torch.set_num_threads(threads)
