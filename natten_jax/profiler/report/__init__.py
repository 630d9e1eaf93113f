"""Results, shown and saved."""
