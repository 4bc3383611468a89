"""What a finished run says of itself: who saw what, what ε covers, and which clusters to doubt.

Each sentence is computed from receipts, occupancy and the transcript, and none is declared. How
they are laid out is a matter of `reports`.
"""
