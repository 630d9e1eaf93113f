"""What backends state, and which of them runs."""
