"""What may be set: the hyper-parameters that protocols share, in groups, and what each does."""
