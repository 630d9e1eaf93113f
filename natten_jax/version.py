"""The version of the package, which the build also reads."""

__version__ = "0.3.0.dev0"
