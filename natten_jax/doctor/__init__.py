"""What is installed, and what can run here."""
