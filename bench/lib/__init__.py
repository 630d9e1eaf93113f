"""What the programs of this folder share: how they start and end, time, record and draw; and what they compare."""
