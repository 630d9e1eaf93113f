"""The version, read by the build, too."""

__version__ = "0.3.0.dev0"
