"""Version of the distribution, stated only here."""

__version__ = "0.1.0"
