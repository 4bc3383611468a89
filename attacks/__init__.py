"""Attacks on what a run's parties observed, one file each, with their scores.

An attack gets a view and knowledge, never the truth: its scorer compares the guess with the truth,
and again with the subjects shuffled, which is chance. It declares what not every run has, such as
true clusters, and is not run without it. Attacks on masks know data and no seeds, since a seed
undoes a mask at once. Of candidates of membership an adversary knows the samples; which of them are
members is the scorer's.

Attacks on mechanisms, and on rules of secure sums, have an off case: they are also tried on a
mechanism or client without the guard, where they have to succeed.
"""

from securecluster.core.lazy_torch import prepare

prepare()
