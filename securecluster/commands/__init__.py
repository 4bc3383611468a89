"""What commands share: options and their help, the plan of a run, and faults in a sentence.

A single command does not belong here, nor what a report shows.
"""
