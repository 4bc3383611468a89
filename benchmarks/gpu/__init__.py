"""Checks that a GPU computes what a CPU does, and timings of local training, within a given time.

python -m benchmarks.gpu --minutes 9 --out DIR [--device auto|cuda|cpu]

A check computes something on the device and compares it with the CPU, or with a plain PyTorch loop
on the CPU; its bound and the reason for it stand beside its error. A small noise grid is run, too.
Timings of a round stand beside a plain loop and one centralised model, and those of a grid's levels
and seeds as one batch beside one run after the other. What does not fit into the time, or lacks an
optional package, is skipped and listed with the reason.

DIR gets `checks.csv`, `timings.csv`, `skipped.csv` and `summary.md`, complete at any moment. The
exit code is 0 where all checks that ran passed, 1 where one failed, and 2 where the command cannot
start. The default device is the GPU where there is one; else the CPU, which checks the same code
against plain PyTorch and says so. No network is used.

Modules: `pieces` (the kinds of work), `checks`, `runs`, `sweeps` and `timings` (the pieces),
`worker` (does them, within a budget), `watchdog` (starts the worker, ends it in time, keeps its
results), `report` (the files).
"""
