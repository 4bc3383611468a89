"""Work in threads: every part once, errors reach the caller, and torch keeps its number."""

from __future__ import annotations

import pytest
import torch

from securecluster.core.devices import cpu_threads
from securecluster.core.threads import each_in_a_thread


@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_every_part_is_worked_on_once_with_one_thread_of_torch(parts: int) -> None:
    done: list[int] = []
    threads: set[int] = set()

    def work(part: int) -> None:
        done.append(part)
        threads.add(torch.get_num_threads())

    with cpu_threads(2):
        each_in_a_thread(work, range(parts))
        assert torch.get_num_threads() == 2
    assert sorted(done) == list(range(parts))
    if parts > 1:
        assert threads == {1}


def test_an_error_reaches_the_caller_and_the_number_of_threads_returns() -> None:
    def work(part: int) -> None:
        if part:
            raise ZeroDivisionError

    with cpu_threads(2):
        with pytest.raises(ZeroDivisionError):
            each_in_a_thread(work, [0, 1])
        assert torch.get_num_threads() == 2
