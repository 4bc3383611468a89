"""Mathematics on matrices: similarities, linkage, cuts, eigenvectors, scores.

Where a matrix is from, and what it may tell, is a matter of protocols.
"""
