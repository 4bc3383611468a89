"""Are the clusters found? Defaults over scenarios, data sets and seeds."""
