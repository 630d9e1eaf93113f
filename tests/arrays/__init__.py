"""Which arrays may be handed in, and how they are cut into words."""
