"""HTML and SVG elements: whatever text goes in is escaped, since names of classes and files may be anything."""

from collections.abc import Iterable
import html
from typing import Any

_VOID = ("img", "meta", "wbr", "line", "rect", "circle", "path")


class Markup(str):
  """Text that is HTML already; only `tag`, `join` and `raw` make it."""

  __slots__ = ()


def text(value: Any) -> str:
  """A value as text for an HTML document.

  Bytes of a file name that are no UTF-8 and control characters, which no HTML document may hold, are shown as escapes.

  >>> print(text("<b> & \\x07"))
  &lt;b&gt; &amp; \\x07
  """
  if isinstance(value, Markup):
    return value
  plain = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
  shown = "".join(
    char if char.isprintable() or char in " \n\u00a0" else char.encode("unicode_escape").decode() for char in plain
  )
  return html.escape(shown, quote=True)


def raw(value: str) -> Markup:
  """Text that the caller knows to be HTML: of this package, never of a file."""
  return Markup(value)


def join(parts: Iterable[Any], between: str = "") -> Markup:
  """Parts one after the other, those that are no markup escaped."""
  return Markup(text(between).join(text(part) for part in parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
  """An element with children and attributes, all escaped unless they are `Markup`.

  Args:
    name: of the element.
    *children: texts and elements; None is left out.
    **attributes: a trailing underscore is dropped (``class_``), others become hyphens (``aria_label``); None leaves an attribute out.

  >>> print(tag("p", "1 < 2", class_="note", title=None))
  <p class="note">1 &lt; 2</p>
  """
  written = "".join(
    f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value is not None
  )
  if name in _VOID and not children:
    return Markup(f"<{name}{written}/>")
  return Markup(f"<{name}{written}>{join(child for child in children if child is not None)}</{name}>")


def paragraph(*children: Any, class_: str | None = None) -> Markup:
  """A paragraph."""
  return tag("p", *children, class_=class_)
