"""Audits: attacks on finished runs and on recordings, claims with their checks, and audits' pages.

Attacks themselves are in `securecluster.attacks`, and the page of a run without an audit in
`reports`.
"""
