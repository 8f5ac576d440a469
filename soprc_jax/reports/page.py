"""Fills the templates of the reports, and writes what their tables are made of."""

from collections.abc import Collection, Sequence
import datetime

import jinja2
from markupsafe import Markup

from soprc_jax._internal.strings import printable

# By this a program knows a page that it may replace.
GENERATOR = "soprc_jax soprc report"


class Number(str):
  """A cell that holds a number as text: it is aligned to the right."""

  __slots__ = ()


Cell = str | float | None


def render(template: str, **values: object) -> Markup:
  """Fills values, escaped unless they are `Markup`, into a file of the folder ``templates``."""
  return Markup(_ENVIRONMENT.get_template(template).render(values))


def document(template: str, **values: object) -> str:
  """Fills a template that extends ``page.html``: the page needs no other file and no network."""
  return str(
    render(template, generator=GENERATOR, made=datetime.datetime.now().astimezone(), **values)
  )


def markup(html: str, *values: object) -> Markup:
  """Fills values, escaped unless they are `Markup`, into a piece of HTML.

  >>> print(markup("<b>{}</b>", "< & \\x07"))
  <b>&lt; &amp; \\x07</b>
  """
  return Markup(html).format(*map(_clean, values))


def name(value: object, most: int = 60) -> Markup:
  """Returns a name from outside; a long one loses its middle and has the whole as its tooltip."""
  whole = printable(value)
  short = shorten(whole, most)
  return markup(
    '<span class="name"{}>{}</span>', "" if short == whole else markup(' title="{}"', whole), short
  )


def shorten(value: str, most: int) -> str:
  """Returns a text of at most ``most`` characters, its middle left out.

  >>> shorten("abcdefghij", 7)
  'abc...j'
  """
  if len(value) <= most:
    return value
  end = (most - 3) // 3
  return f"{value[: most - 3 - end]}...{value[len(value) - end :]}"


def number(value: float | None, digits: int = 4) -> Number:
  """Returns a cell: a float with ``digits`` digits, an integer with commas, a dash for None."""
  if value is None:
    return Number("-")
  return Number(f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}")


def table(
  caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, own: Collection[int] = ()
) -> Markup:
  """Returns a table in a box that scrolls by itself where it is too wide.

  Args:
    caption: what it shows.
    header: one text a column.
    rows: cells; the first of each row is its heading. `number` writes numbers and None.
    own: numbers of rows that stand out.
  """
  cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
  return render("table.html", caption=caption, header=header, rows=cells, own=own)


def is_own(text: str) -> bool:
  """Returns whether a page was made here."""
  return f'<meta name="generator" content="{GENERATOR}"/>' in text[:2000]


def _clean(value: object) -> object:
  """Escapes what no HTML document may hold: control characters, bytes that are no UTF-8."""
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
