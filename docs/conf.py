"""Configures the documentation.

Build it without a network connection: ``python -m sphinx -W --keep-going -b html docs
docs/_build/html``.
"""

import functools
import importlib
import operator
from pathlib import Path
import re
import runpy
from typing import Any

from docutils import nodes
from latex2mathml import converter

_ROOT = Path(__file__).resolve().parents[1]

project = "soprc_jax"
author = "the authors of soprc_jax"
release = runpy.run_path(str(_ROOT / "soprc_jax" / "version.py"))["__version__"]
version = release

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "sphinx_copybutton"]
# Examples are copied without their prompts and their output.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build"]
# Formulas as MathML, which browsers render: MathJax would be fetched from the network.
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"soprc_jax {release}"
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False

# Single backticks in docstrings: a link where the name is documented, code where it is not.
default_role = "py:obj"
autodoc_member_order = "bysource"
# Docstrings state shapes and ranges, which Any does not.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

myst_enable_extensions = ["dollarmath", "html_image"]
# Checks links to headings of other pages: a missing heading is an error of the build.
myst_heading_anchors = 3

# Notebooks are stored without outputs. A build runs those that have changed since the last build.
nb_execution_mode = "cache"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# Pages that are files of the repository, which remain their only source.
_PAGES = {"results": "results/README.md"}


def _from_repository(app: Any, page: str, source: list[str]) -> None:
  """Replaces a page by its file of the repository, and each mark by the text generated from code.

  Marks: ``[modules PACKAGE]``, ``[keys MODULE]``.
  """
  del app
  if page in _PAGES:
    path = _ROOT / _PAGES[page]
    source[0] = _moved(path.read_text(), path.parent)
  source[0] = re.sub(
    r"^\[modules (\w+)\]$", lambda match: _modules(match[1]), source[0], flags=re.M
  )
  source[0] = re.sub(r"^\[keys ([\w.]+)\]$", lambda match: _keys(match[1]), source[0], flags=re.M)


def _modules(package: str) -> str:
  """Returns a section for each public module of ``soprc_jax.PACKAGE``, so that none is missing."""
  names = sorted(path.stem for path in (_ROOT / "soprc_jax" / package).glob("[!_]*.py"))
  section = (
    "## {name}\n\n```{{eval-rst}}\n.. automodule:: soprc_jax.{package}.{name}\n   :members:\n```\n"
  )
  return "\n".join(section.format(name=name, package=package) for name in names)


def _keys(name: str) -> str:
  """Returns a table of the config keys in ``KEYS`` of a module, with the value of each preset where
  the module has ``PRESETS``.
  """
  module = importlib.import_module(name)
  presets = getattr(module, "PRESETS", {})
  rows = ["| key | default | must be | meaning |", "|---|---|---|---|"]
  for key in module.KEYS:
    default = f"`{key.default!r}`"
    if key.default is None and key.name.startswith("loss.") and presets:
      path = key.name.removeprefix("loss.").split(".")
      values = {
        name: functools.reduce(operator.getitem, path, preset) for name, preset in presets.items()
      }
      default = ", ".join(f"{name}: `{value!r}`" for name, value in values.items())
    users = (*key.losses, *(key.used_with[1] if key.used_with else ()))
    marks = [f"used by {', '.join(users)}"] * bool(users) + ["may change on resume"] * key.on_resume
    rows.append(
      f"| `{key.name}` | {default} | {key.allowed} | {'; '.join([key.meaning, *marks])} |"
    )
  return "\n".join(rows) + "\n"


def _moved(text: str, folder: Path) -> str:
  """Rewrites the relative links and images in the text of a file in ``folder`` for docs/."""

  def place(path: str) -> str:
    return str((folder / path).resolve().relative_to(_ROOT))

  def link(match: re.Match[str]) -> str:
    path, anchor = place(match[1]), match[2] or ""
    pages = [page for page, file in _PAGES.items() if file == path]
    return f"]({pages[0]}.md{anchor})" if pages else f"](path:../{path})"

  text = re.sub(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]+)?\)", link, text)
  return re.sub(r'src="(?!https?:)([^"]+)"', lambda match: f'src="../{place(match[1])}"', text)


def _skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
  """Skips the generated docstrings of named tuples' fields: the docstring of the class has them."""
  del app, what, name, skip, options
  return (
    True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None
  )


def _inline_math(translator: Any, node: Any) -> None:
  translator.body.append(converter.convert(node.astext()))
  raise nodes.SkipNode


def _block_math(translator: Any, node: Any) -> None:
  translator.body.append(
    f'<div class="math">{converter.convert(node.astext(), display="block")}</div>'
  )
  raise nodes.SkipNode


def setup(app: Any) -> None:
  app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
  app.connect("source-read", _from_repository)
  app.connect("autodoc-skip-member", _skip_fields)
