"""Fills the templates of the reports, and formats the cells of their tables."""

from collections.abc import Collection, Sequence
import datetime

import jinja2
from markupsafe import Markup

from soprc_jax._internal.strings import printable

# Marks pages that a program may overwrite.
GENERATOR = "soprc_jax soprc report"


class Number(str):
  """Marks the text of a cell as a number, which is aligned to the right."""

  __slots__ = ()


Cell = str | float | None


def render(template: str, **values: object) -> Markup:
  """Fills values into a file of the folder ``templates``, escaped unless they are `Markup`."""
  return Markup(_ENVIRONMENT.get_template(template).render(values))


def document(template: str, **values: object) -> str:
  """Fills a template that extends ``page.html``: the page needs no other file and no internet."""
  return str(
    render(template, generator=GENERATOR, made=datetime.datetime.now().astimezone(), **values)
  )


def markup(html: str, *values: object) -> Markup:
  """Fills values into a piece of HTML, escaped unless they are `Markup`.

  >>> print(markup("<b>{}</b>", "< & \\x07"))
  <b>&lt; &amp; \\x07</b>
  """
  return Markup(html).format(*map(_clean, values))


def name(value: object, most: int = 60) -> Markup:
  """Returns a name as HTML; a long name loses its middle and has the full name as its tooltip.

  Args:
    value: the name, from outside this package.
    most: maximum number of shown characters.
  """
  whole = printable(value)
  short = shorten(whole, most)
  return markup(
    '<span class="name"{}>{}</span>', "" if short == whole else markup(' title="{}"', whole), short
  )


def shorten(value: str, most: int) -> str:
  """Shortens a text to at most ``most`` characters by leaving out its middle.

  >>> shorten("abcdefghij", 7)
  'abc...j'
  """
  if len(value) <= most:
    return value
  end = (most - 3) // 3
  return f"{value[: most - 3 - end]}...{value[len(value) - end :]}"


def number(value: float | None, digits: int = 4) -> Number:
  """Formats a cell: a float with ``digits`` decimals, an integer with commas, a dash for None."""
  if value is None:
    return Number("-")
  return Number(f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}")


def table(
  caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, own: Collection[int] = ()
) -> Markup:
  """Returns a table in a box, which scrolls separately from the page if the table is too wide.

  Args:
    caption: what the table shows.
    header: one text per column.
    rows: cells; the first of each row is its heading. `number` formats numbers and None.
    own: indices of highlighted rows; default: none.
  """
  cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
  return render("table.html", caption=caption, header=header, rows=cells, own=own)


def is_own(text: str) -> bool:
  """Returns whether a page was made by this program."""
  return f'<meta name="generator" content="{GENERATOR}"/>' in text[:2000]


def _clean(value: object) -> object:
  """Escapes what HTML does not allow: control characters, and bytes that are not UTF-8."""
  return value if hasattr(value, "__html__") else "\n".join(map(printable, str(value).split("\n")))


_ENVIRONMENT = jinja2.Environment(
  loader=jinja2.PackageLoader("soprc_jax.reports"),
  autoescape=True,
  undefined=jinja2.StrictUndefined,
  finalize=_clean,
  trim_blocks=True,
  lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"name": name, "commas": lambda count: f"{count:,}"}
_ENVIRONMENT.tests["numeric"] = lambda cell: isinstance(cell, Number)
