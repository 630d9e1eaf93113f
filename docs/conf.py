"""Sphinx configuration: ``make docs`` builds the site into ``build/docs`` and treats every warning as an error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import signature as signature_of
from sphinx.util.typing import stringify_annotation

from natten_jax import __version__

_DOCS = Path(__file__).parent

project = "natten_jax"
author = "The natten_jax developers"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"natten_jax {__version__}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = "images/logo.svg"
html_favicon = "images/logo.svg"

# The copy button copies only the commands of an example, without prompts and output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence"]
myst_html_meta = {
    "description": "Neighborhood attention (sliding windows over sequences, images and videos) for JAX and Flax: "
    "CUDA kernels for NVIDIA GPUs, kernels for CPUs, and plain JAX for every other device.",
    "keywords": "JAX, Flax, NATTEN, neighborhood attention, sliding window attention, local attention, H100, H200, "
    "A100, B200, RTX 4090, L40S, GH200, TPU, Colab, CUDA, CUTLASS, FlashAttention, DiNAT, HDiT",
}

# The pages are also read in the repository, so they are plain Markdown. Links in the pages name files and headings, so
# headings of the first three levels get anchors.
myst_heading_anchors = 3

# Notebooks are stored with results for readers of the repository (`make notebooks`), but each build runs them again.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autosummary_generate = True
maximum_signature_line_length = 88
autodoc_typehints = "description"  # types are in the description of each argument, next to its shape
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # otherwise attributes of named tuples appear twice

# References to this package must resolve. References to other packages are plain text, because a build has no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!natten_jax\.).*")]
# Types in signatures that the pages do not document. Users get objects of these types from one call, and only pass them
# to another call.
nitpick_ignore = [
    ("py:class", "natten_jax.cost_model.tiles.TimedTiles"),
    ("py:class", "natten_jax.element_types.ElementType"),
    ("py:class", "natten_jax.flax_modules.attention_fn.Performance"),
    ("py:class", "natten_jax.autotuning.configurations.Tuned"),
    ("py:class", "natten_jax.plan.plan.Plan"),
    ("py:class", "natten_jax.windows.WindowArguments"),
]

#: Matches links to files outside the folder of the pages, but no images. Links with brackets in their text do not match
#: either: in a notebook's JSON, such a text could enclose whole cells.
_LINK_OUT_OF_PAGES = re.compile(r"(?<!!)\[([^\[\]]+)\]\((\.\./[^)\s]+)\)")


#: Search words by page. If a reader searches for a word of a page, the search lists that page first.
_SEARCH_WORDS = {
    "installation": "cuda, install, pip, wheels",
    "windows": "causal, dilation, edges, local attention, sliding window, sliding window attention, stride",
    "flax": "dropout, linen, nnx, rope, rotary, rotary embedding",
    "biases": "attention mask, bias, mask, masks, relative position bias, sinks",
    "boxes": "extents, packed sequences, padding, query_origin, segment ids, segments, sequence lengths, varlen",
    "coming-from-natten": "natten, pytorch",
    "decoding": "autoregressive, cache, decode, decoding, generation, inference, kv cache, prefill",
    "checkpoints": "checkpoint, checkpoints, eval, orbax, restore, save, train",
    "performance": "memory, remat, rematerialisation, slow, speed",
    "scaling": "data parallel, distributed, halo, mesh, multi-gpu, multi-host, shard_map, sharding",
    "troubleshooting": "error, nan, out of memory",
    "platforms": "a100, colab, conda, docker, gpu, h100, macos, rocm, t4, v100",
    "tpu": "tpu, tpus",
    "blackwell": "b200, blackwell",
    "fp8": "fp8, float8, quantization",
    "glossary": "definitions, glossary, query tile, terms",
}

_BOX_DRAWING = re.compile("[│┃━─]")
_TELEPHONE_COLUMNS = 74  # number of legible letters that fit the width of a phone (site.css)


def _name_files_of_the_repository(_: Sphinx, page: str, text: list[str]) -> None:
    """Replace each link to a file outside the site by the file's path in the repository."""

    def path(link: re.Match[str]) -> str:
        target = (_DOCS / page).parent.joinpath(link[2]).resolve()
        if not target.exists():
            raise ValueError(f"{page} has a link to {link[2]}, which does not exist")
        if target.is_relative_to(_DOCS):
            return link[0]
        name = f"`{target.relative_to(_DOCS.parent)}`"
        return name if link[1].strip("`") in (name.strip("`"), target.name) else f"{link[1]} ({name})"

    text[0] = _LINK_OUT_OF_PAGES.sub(path, text[0])


def _sign_flax_modules(
    app: Sphinx, kind: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Show the arguments of a Flax module's constructor and their types, which the module's metaclass hides.

    Default values other than strings, numbers, booleans and ``None`` are shown as ``...``.
    """
    if kind != "class" or not name.startswith(("natten_jax.flax_modules.nnx.", "natten_jax.flax_modules.linen.")):
        return None
    _, *parameters = signature_of(obj.__init__).parameters.values()
    # Flax adds the arguments ``parent`` and ``name``.
    parameters = [each for each in parameters if each.name not in ("parent", "name")]
    typed = [each for each in parameters if each.annotation != each.empty]
    types = {each.name: stringify_annotation(each.annotation, "smart") for each in typed}
    app.env.current_document.autodoc_annotations[name] = types
    plain = str, int, float, bool, type(None)
    shown = [
        each.replace(
            annotation=each.empty,
            default=each.default if each.default is each.empty or isinstance(each.default, plain) else ...,
        )
        for each in parameters
    ]
    return str(inspect.Signature(shown)).replace("Ellipsis", "..."), returned


def _show_one_signature(app: Sphinx) -> None:
    """Document a single signature of each function whose overloads differ only in the type of the result."""
    for module in ("natten_jax.ops.attention", "natten_jax.ops.neighborhood"):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()


def _class_printed_tables(_: Sphinx, doctree: nodes.document) -> None:
    """Give each block that contains a printed table a CSS class that preserves the columns of the table."""
    for block in doctree.findall(nodes.literal_block):
        columns = max((len(line) for line in block.astext().splitlines() if _BOX_DRAWING.search(line)), default=0)
        if columns:
            block["classes"] += ["printed-table", *(["is-wide"] if columns > _TELEPHONE_COLUMNS else [])]


def _add_search_words(app: Sphinx, doctree: nodes.document) -> None:
    """Add a page's search words to the index as main entries. The search ranks main entries above other matches."""
    words = _SEARCH_WORDS.get(app.env.current_document.docname, "")
    entries = [("single", word, "", "main", None) for word in words.split(", ") if word]
    if entries:
        next(doctree.findall(nodes.section)).append(addnodes.index(entries=entries))


def setup(app: Sphinx) -> None:
    """Connect the functions of this file to events of Sphinx. Sphinx calls this function."""
    unknown = [page for page in _SEARCH_WORDS if not (_DOCS / f"{page}.md").exists()]
    if unknown:
        raise ValueError(f"search words of pages that do not exist: {', '.join(unknown)}")
    app.connect("builder-inited", _show_one_signature)
    app.connect("autodoc-process-signature", _sign_flax_modules)
    app.connect("doctree-read", _class_printed_tables)
    app.connect("doctree-read", _add_search_words)
    app.connect("source-read", _name_files_of_the_repository)
