"""Where the kernel sources are: in a checkout, or in the installed package.

Must not know which files there are; a family names its own.
"""

from __future__ import annotations

from pathlib import Path


def kernel_sources() -> Path:
    """Return the folder that holds `sm90/`, `cpu/` and their siblings.

    Raises:
        FileNotFoundError: neither place has them, so nothing can be compiled here.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "kernel_sources", package.parent / "csrc" / "kernels")
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"no kernel sources: looked in {places[0]} and {places[1]}. Reinstall ktlib, or work in a clone."
    )
