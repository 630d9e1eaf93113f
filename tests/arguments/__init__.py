"""Tests of the arguments that users pass, and of the error messages for invalid arguments."""
