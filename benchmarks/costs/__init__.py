"""What does it cost? Seconds, bytes and memory of runs, protections and mechanisms."""
