"""Does it fit in? Apps and models of others, over Flower and with frozen parameters."""
