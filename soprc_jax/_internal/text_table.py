"""Text tables: Markdown, and aligned columns for a terminal."""

from collections.abc import Iterable, Sequence

from soprc_jax._internal import strings


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a Markdown table, without a trailing line end.

  >>> print(markdown(["loss", "mAUPRC"], [["SOPRC", "0.62"]]))
  | loss | mAUPRC |
  |---|---|
  | SOPRC | 0.62 |
  """
  first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
  return "\n".join([first, "|---" * len(header) + "|", *others])


def cell(name: str) -> str:
  r"""Formats an external name for a cell: printable, and no ``|`` that would end the cell.

  >>> print(cell("a|b"))
  a\|b
  """
  return strings.printable(name).replace("|", r"\|")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns one line per row, with columns two blanks apart and as wide as their longest cell.

  >>> aligned([["a", "1"], ["long", "2"]])
  ['a     1', 'long  2']
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in rows]
