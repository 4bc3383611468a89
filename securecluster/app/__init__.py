"""The command line, run folders, reports and pictures: the only code that knows protocols by name."""
