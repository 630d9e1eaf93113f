"""The boundary to native code."""
