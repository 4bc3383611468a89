"""Communication between parties: messages, frames, their bounds, and transcripts.

Who sends what, and what may leave a client, is decided in `runtime`.
"""
