"""What users pass, and what is said when they pass something else."""
