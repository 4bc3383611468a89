"""`python -m securecluster`."""

from securecluster.app.cli import entry

entry()
