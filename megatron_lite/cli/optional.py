"""Packages that a verb can use and does without."""

from importlib.util import find_spec


def installed(package: str) -> bool:
    """Can the package be imported? It is not imported here."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what a finder raises that hides packages
        return False
