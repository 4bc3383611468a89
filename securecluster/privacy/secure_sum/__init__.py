"""Primitives of secure sums: the server learns the sum of the clients' rows, and no single row."""
