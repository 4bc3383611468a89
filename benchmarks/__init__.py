"""One script per figure or table of evidence; `python -m securecluster.benchmarks.NAME` writes its
CSV to `results/`.
"""

from securecluster.core.lazy_torch import prepare

prepare()
