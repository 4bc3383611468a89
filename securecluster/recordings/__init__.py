"""Recordings of apps of others: what a server of Flower sent and received, in a folder.

Transcripts of this project's own runs are in `messaging`, and audits of recordings in `audits`.
"""
