"""Attacks on what a run's parties observed, one file each, with their scores."""

from securecluster.core.lazy_torch import prepare

prepare()
