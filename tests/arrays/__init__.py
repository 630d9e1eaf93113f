"""Arrays that operators accept."""
