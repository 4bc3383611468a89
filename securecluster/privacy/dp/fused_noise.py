"""When `grid_noise` has its blocks done by `noise_kernel`, which numba compiles.

numpy takes some forty passes for a Gaussian, and compiled code takes one, for the same bits: a draw
that float64 may round to a wrong integer is named, and made again without error. numba is an extra
(`pip install 'securecluster[fast]'`); without it numpy draws. numba takes half a second to load,
and two more to compile, once for a machine. So numpy draws the first `WORTH` numbers of a process,
for which it takes about as long.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

# numbers of a process from which loading pays
WORTH = 1 << 26


class Usage:
    """Numbers that numpy has drawn in this process, which tell whether loading pays.

    Args:
        numbers: drawn before.
    """

    def __init__(self, numbers: int = 0) -> None:
        self._numbers = numbers

    def pays(self, numbers: int) -> bool:
        """Return whether numbers are drawn by the compiled function; else count them.

        Args:
            numbers: to be drawn.
        """
        if self._numbers < WORTH:
            self._numbers += numbers
            return False
        return kernel() is not None


usage = Usage()


@functools.cache
def kernel() -> Callable[..., int] | None:
    """Return `noise_kernel.draw`; None where numba is missing, or does not go with this numpy."""
    try:
        module = importlib.import_module("securecluster.privacy.dp.noise_kernel")
    except ImportError:
        return None
    draw: Callable[..., int] = module.draw
    return draw
