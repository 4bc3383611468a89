"""The packages that `securecluster new` writes: a module of each kind, and its test.

A package is a copy of a module and a test of this folder, in which the names of the module and its
class are the author's.
"""
