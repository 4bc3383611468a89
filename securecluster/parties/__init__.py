"""The parties of a run: what each derives from a method and its facts, and their two halves.

Here stands what a run needs of a method, and what is found of it before a run starts. How messages
travel is in `runtime`, and how a run goes on in `runs`.
"""
