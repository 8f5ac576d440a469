"""The parts of a page: sections with an index, tables in boxes of their own, cards, the whole document."""

from collections.abc import Sequence
import datetime
from typing import Any, NamedTuple

from soprc_jax._internal.strings import printable
from soprc_jax.reports.markup import Markup, join, paragraph, raw, tag
from soprc_jax.reports.style import CSS

# By this a program knows a page that it may replace.
GENERATOR = "soprc_jax experiments.report"


class Section(NamedTuple):
  """A part of the page.

  Attributes:
    key: of the link to it.
    title: heading.
    body: content.
  """

  key: str
  title: str
  body: Markup


class Cell(NamedTuple):
  """A cell of a table that is more than text: content, and whether it is a number."""

  content: Any
  number: bool = False


def number(value: Any, digits: int = 4) -> Cell:
  """A cell with a number: a float of so many digits, an integer with commas; a dash for None."""
  if value is None:
    return Cell("-", True)
  return Cell(f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}", True)


def name(value: Any, most: int = 60) -> Cell:
  """A cell with a name of somebody else, of any length."""
  return Cell(label(str(value), most))


def label(value: str, most: int) -> Markup:
  """A name of somebody else: a long one loses its middle, and is told in full where the pointer rests on it."""
  value = printable(value)
  short = shorten(value, most)
  return tag("span", short, class_="name", title=None if short == value else value)


def shorten(value: str, most: int) -> str:
  """A text of at most so many characters, its middle left out.

  >>> shorten("abcdefghij", 7)
  'abc...j'
  """
  if len(value) <= most:
    return value
  end = (most - 3) // 3
  return f"{value[: most - 3 - end]}...{value[len(value) - end :]}"


def table(caption: str, header: Sequence[Any], rows: Sequence[Sequence[Any]], *, own: Sequence[int] = ()) -> Markup:
  """A table in a box that scrolls by itself where it is too wide.

  Args:
    caption: what it shows.
    header: one text a column.
    rows: cells; the first of each row is its heading.
    own: numbers of rows that stand out.
  """
  first = rows[0] if rows else ()
  is_number = [isinstance(cell, Cell) and cell.number for cell in first] or [False] * len(header)
  head = [tag("th", title, scope="col", class_="number" if wide else None) for title, wide in zip(header, is_number)]
  body = [
    tag(
      "tr", _cell("th", row[0], scope="row"), *(_cell("td", cell) for cell in row[1:]), class_="own" if i in own else None
    )
    for i, row in enumerate(rows)
  ]
  content = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), aria_label=caption)
  # The caption stays where it is while the table scrolls.
  box = tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=caption)
  return tag("figure", tag("figcaption", caption), box, class_="table")


def cards(values: Sequence[tuple[str, str]]) -> Markup:
  """Headline figures."""
  return tag("dl", *(tag("div", tag("dt", title), tag("dd", value)) for title, value in values), class_="cards")


def details(summary: str, *children: Any) -> Markup:
  """Content that a reader opens."""
  return tag("details", tag("summary", summary), *children)


def document(title: str, intro: Markup, sections: Sequence[Section]) -> str:
  """The page, complete and on its own: it asks the network for nothing."""
  index = [tag("li", tag("a", section.title, href=f"#{section.key}")) for section in sections]
  body = [
    tag("header", tag("h1", title), intro),
    tag("nav", tag("ul", *index), aria_label="Contents"),
    tag(
      "main",
      *(
        tag(
          "section",
          tag("h2", section.title, id=f"{section.key}-title"),
          section.body,
          id=section.key,
          aria_labelledby=f"{section.key}-title",
        )
        for section in sections
      ),
    ),
    tag("footer", paragraph(f"Made by {GENERATOR} on {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.")),
  ]
  head = [
    tag("meta", charset="utf-8"),
    tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
    tag("meta", name="generator", content=GENERATOR),
    tag("meta", name="color-scheme", content="light dark"),
    tag("title", title),
    tag("style", raw(CSS)),
  ]
  return "<!DOCTYPE html>\n" + tag("html", tag("head", *head), "\n", tag("body", join(body, "\n")), lang="en") + "\n"


def is_own(text: str) -> bool:
  """Whether a page has been made here."""
  return f'<meta name="generator" content="{GENERATOR}"/>' in text[:2000]


def _cell(kind: str, cell: Any, **attributes: str) -> Markup:
  content, is_number = (cell.content, cell.number) if isinstance(cell, Cell) else (cell, False)
  return tag(kind, content, class_="number" if is_number else None, **attributes)
