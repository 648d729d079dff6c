"""Which Paceline this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = ""


@cache
def installed_version() -> str:
    """As the installed package says; `UNKNOWN` where it runs from a folder without having been installed."""
    try:
        return version("paceline")
    except PackageNotFoundError:
        return UNKNOWN
