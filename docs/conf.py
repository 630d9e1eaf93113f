"""The documentation site: ``make docs`` builds it into ``build/docs``, and takes every warning for an error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from natten_jax import __version__

_DOCS = Path(__file__).parent

project = "natten_jax"
author = "The natten_jax developers"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"natten_jax {__version__}"
html_show_copyright = False

# The pages are read in the repository, too: plain Markdown, with links between files and their headings.
myst_heading_anchors = 3

# Notebooks are kept without results, and each build runs them.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autosummary_generate = True
autodoc_typehints = "none"  # the text of an argument says what it is
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else attributes of named tuples are there twice

# References to this package have to lead somewhere; those to others are left as text, because a build needs no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!natten_jax\.).*")]

_LINK_OUT_OF_PAGES = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def _name_files_of_the_repository(_: Sphinx, page: str, text: list[str]) -> None:
    """Give the path in place of a link to a file of the repository, which is no part of the site."""

    def path(link: re.Match[str]) -> str:
        target = (_DOCS / page).parent.joinpath(link[2]).resolve()
        if not target.exists():
            raise ValueError(f"{page} has a link to {link[2]}, which does not exist")
        name = f"`{target.relative_to(_DOCS.parent)}`"
        return name if link[1].strip("`") == name.strip("`") else f"{link[1]} ({name})"

    text[0] = _LINK_OUT_OF_PAGES.sub(path, text[0])


def _sign_flax_modules(
    _: Sphinx, kind: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """The arguments of a Flax module, which its metaclass hides; defaults that are functions are not spelled out."""
    if kind != "class" or not name.startswith(("natten_jax.flax_modules.nnx.", "natten_jax.flax_modules.linen.")):
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    plain = str, int, float, bool, type(None)
    shown = [
        each.replace(
            annotation=each.empty,
            default=each.default if each.default is each.empty or isinstance(each.default, plain) else ...,
        )
        for each in parameters
        if each.name not in ("parent", "name")  # Flax's own
    ]
    return str(inspect.Signature(shown)).replace("Ellipsis", "..."), returned


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _sign_flax_modules)
    app.connect("source-read", _name_files_of_the_repository)
