"""Padded pairs: the server reads sums over two clients, and no row of one."""
