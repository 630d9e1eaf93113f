"""Tests of the repository itself: documentation, examples, packaging, import layers and workflows."""
