"""What passes between parties: messages, frames, their bounds, and transcripts."""
