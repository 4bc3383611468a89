"""Run folders: what is in them, who may write, and how their files are read again."""
