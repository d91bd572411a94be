"""The library's version, for those who may not import the whole library."""

__version__ = "0.1.0"
