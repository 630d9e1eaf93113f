"""Element types on the command line: how they are spelled, and what JAX needs to make arrays of them."""

from __future__ import annotations

import argparse
import contextlib

import jax

from natten_jax import element_types

#: Names by the short names that reports show, the longest first.
ELEMENT_TYPES = {
    each.short_name: each.name
    for each in sorted(element_types.ELEMENT_TYPES.values(), key=lambda each: each.bytes, reverse=True)
}


def element_type(text: str) -> str:
    """The short name of an element type, which may be given by its full name, too."""
    known = element_types.ELEMENT_TYPES.get(text)
    short = text if known is None else known.short_name
    if short not in ELEMENT_TYPES:
        names = ", ".join(f"{short} ({name})" for short, name in ELEMENT_TYPES.items())
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is unknown; choose one of {names}")
    return short


def arrays_of(short_name: str) -> contextlib.AbstractContextManager[object]:
    """A context in which JAX makes arrays of an element type, and does not round 64 bits to 32."""
    return jax.enable_x64(True) if short_name == "fp64" else contextlib.nullcontext()
