"""Communication between parties: messages, frames, their bounds, and transcripts."""
