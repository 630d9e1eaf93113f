"""What ran on a device, read from traces."""
