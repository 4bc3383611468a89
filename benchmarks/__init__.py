"""One script per figure or table of evidence; `python -m benchmarks.NAME`, at the top of the
repository, writes its CSV to `results/`.
"""

from securecluster.core.lazy_torch import prepare

prepare()
