"""Questions about an installation."""
