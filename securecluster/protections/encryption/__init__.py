"""Sums and pairs of ciphertexts, which the server adds and a key authority decrypts."""
