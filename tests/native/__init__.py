"""The native libraries: what they offer, what they refuse, and how they are called."""
