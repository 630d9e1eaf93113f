"""What users pass, checked."""
