"""Mathematics on matrices: similarities, linkage, cuts, eigenvectors, scores."""
