"""Secure sums: clients mask their replies, so that the server reads sums over two or more only."""
