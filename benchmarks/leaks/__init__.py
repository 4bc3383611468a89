"""What can be read? Attacks, liars, neighbouring data sets, and sums over rounds."""
