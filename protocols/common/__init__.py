"""What all protocols stand on: the base class, clients, pending updates, averaging, options."""
