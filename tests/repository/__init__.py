"""The repository itself: documentation, examples, packaging, layers and workflows."""
