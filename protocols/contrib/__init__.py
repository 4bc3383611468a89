"""Methods of other authors, each a file or a package of its own: guests.

They are written against the interface that any author has (`securecluster.protocols.authoring`) and
nothing else, pass the same checks as the methods of the house, and are as easy to take away as to
add: a file, its row in `registry.PROTOCOLS`, its line in the stub of `securecluster.protocols`, and
its tests. What they lack is missing from the interface. Less is promised of their upkeep: a guest
that nobody looks after may leave with the next release.
"""

MODULES_APART = True
"""No guest's program depends on the modules of others (`securecluster.parties.program`)."""
