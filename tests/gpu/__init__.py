"""What only an NVIDIA GPU shows."""
