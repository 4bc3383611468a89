"""Sums of ciphertexts (BFV and CKKS): parameters, ciphers, packing and sealed envelopes."""
