"""The version of the package. The build also reads the version from this file."""

__version__ = "0.3.0.dev0"
