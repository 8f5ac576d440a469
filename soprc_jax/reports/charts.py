"""Draws line charts and histograms as inline SVG, whose colors follow the scheme of the page.

A chart is drawn for a width of 400 pixels and scales with its container, so that its text stays
legible on a phone. The legend is HTML below the chart and cannot cover a curve.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

from markupsafe import Markup
from matplotlib import ticker
import numpy as np

from soprc_jax.reports import page

WIDTH, HEIGHT = 400, 250
# Edges of the plot area: left, right, top, bottom.
LEFT, RIGHT, TOP, BOTTOM = 52, 388, 30, 206
_COLOURS, _DASHES = 6, 3
_MAX_POINTS = 400


class Series(NamedTuple):
  """Holds a curve.

  Attributes:
    name: name in the legend.
    x: ``[N]`` values.
    y: ``[N]`` values; a value that is not finite leaves a gap.
    style: number >= 0 that selects color and dashes; None: thick, in the color of the text.
    dash: 0 solid, 1 dashed, 2 dotted; None: by the style, so that curves can be distinguished
      without color.
    marks: whether each point is marked.
    faint: whether the curve is thin and pale.
  """

  name: str
  x: np.ndarray
  y: np.ndarray
  style: int | None = 0
  dash: int | None = None
  marks: bool = False
  faint: bool = False


class Scale(NamedTuple):
  """Maps values linearly to pixels.

  >>> Scale(0.0, 10.0, 52, 388).at(5.0)
  220.0
  """

  low: float
  high: float
  start: float
  end: float

  def at(self, value: float) -> float:
    """Returns the pixel of a value."""
    return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


def line_chart(
  title: str,
  series: Sequence[Series],
  *,
  x_label: str,
  y_label: str,
  x_range: tuple[float, float] | None = None,
  y_range: tuple[float, float] | None = None,
  marked: tuple[float, str] | None = None,
  note: str = "",
) -> Markup:
  """Draws curves with axes, and a legend if there are several.

  Args:
    title: what the chart shows.
    series: curves. The legend marks those without a finite value as having no values.
    x_label: label of the x axis, with its unit.
    y_label: label of the y axis, with its unit.
    x_range: range of the x axis; None: the range of the values.
    y_range: range of the y axis; None: the range of the values.
    marked: an x value with a vertical line, and its name in the legend.
    note: text below the chart; default: none.
  """
  drawn = [(one, _finite(one)) for one in series]
  points = [found for _, found in drawn if found[0].size]
  if not points:
    return empty(title, "No value has been logged.")
  x = Scale(*(x_range or _range([found[0] for found in points])), LEFT, RIGHT)
  y = Scale(*(y_range or _range([found[1] for found in points], room=0.05)), BOTTOM, TOP)
  legend = [
    (_classes(one), one.name if found[0].size else f"{one.name} (no values)")
    for one, found in drawn
  ]
  return _draw(
    title,
    x,
    y,
    (x_label, y_label),
    f"{title}: {y_label} against {x_label}; {'; '.join(_in_words(one) for one in series)}",
    curves=[_curve(one, x, y) for one, found in drawn if found[0].size],
    mark=(_px(x.at(marked[0])), marked[1]) if marked and x.low <= marked[0] <= x.high else None,
    legend=legend + ([("mark", marked[1])] if marked else []) if len(series) > 1 or marked else [],
    note=note,
  )


def histogram(
  title: str, values: np.ndarray, *, edges: np.ndarray, x_label: str, y_label: str
) -> Markup:
  """Draws a histogram of the number of values between ascending edges ``[B + 1]``."""
  values = values[np.isfinite(values)]
  counts, _ = np.histogram(values, edges)
  if not counts.any():
    return empty(title, "There is no value to show.")
  x = Scale(float(edges[0]), float(edges[-1]), LEFT, RIGHT)
  y = Scale(0.0, float(counts.max()) * 1.05, BOTTOM, TOP)
  parts = zip(edges[:-1], edges[1:], counts, strict=True)
  bars = [_bar(x, y, float(low), float(high), int(count)) for low, high, count in parts if count]
  told = (
    f"{title}: {len(values)} values from {values.min():.3g} to {values.max():.3g}, median "
    f"{np.median(values):.3g}"
  )
  return _draw(title, x, y, (x_label, y_label), told, bars=bars)


def empty(title: str, reason: str) -> Markup:
  """Returns the frame of a chart with the reason why it is empty."""
  return page.render("chart.html", title=title, axes=None, legend=(), note=reason)


def thinned(
  x: np.ndarray, y: np.ndarray, most: int = _MAX_POINTS
) -> tuple[np.ndarray, np.ndarray, int]:
  """Averages groups of neighboring points, so that at most ``most`` points remain.

  The means ignore NaN.

  Returns:
    x and y of the means, and the number of points per mean.

  >>> thinned(np.arange(4.0), np.array([1.0, 3.0, np.nan, 5.0]), most=2)
  (array([0.5, 2.5]), array([2., 5.]), 2)
  """
  size = max(math.ceil(len(x) / most), 1)
  starts = np.arange(0, len(x), size)
  if size == 1:
    return x, y, 1
  kept = np.isfinite(y)
  counts = np.add.reduceat(kept.astype(float), starts)
  sums = np.add.reduceat(np.where(kept, y, 0.0), starts)
  means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
  return np.add.reduceat(x, starts) / np.diff([*starts, len(x)]), means, size


def _finite(one: Series) -> tuple[np.ndarray, np.ndarray]:
  kept = np.isfinite(one.x) & np.isfinite(one.y)
  return one.x[kept], one.y[kept]


def _range(values: Sequence[np.ndarray], room: float = 0.0) -> tuple[float, float]:
  """Returns the range from the least to the largest value, with some room; never empty."""
  low, high = min(float(one.min()) for one in values), max(float(one.max()) for one in values)
  if 0 <= low < 0.6 * high:
    low = 0.0  # an axis from 0 does not exaggerate differences
  if high - low <= 1e-9 * max(abs(high), abs(low)):
    low, high = (0.0, high * 1.5) if high > 0 else (low * 1.5, 0.0) if low < 0 else (0.0, 1.0)
  return low - (room * (high - low) if low else 0.0), high + room * (high - low)


def _ticks(low: float, high: float) -> list[float]:
  found = ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
  tolerance = 1e-9 * (high - low)
  return [float(value) for value in found if low - tolerance <= value <= high + tolerance]


def _number(value: float) -> str:
  return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def _px(value: float) -> str:
  return f"{value:.1f}".rstrip("0").rstrip(".")


def _draw(
  title: str,
  x: Scale,
  y: Scale,
  labels: tuple[str, str],
  description: str,
  *,
  curves: Sequence[dict[str, object]] = (),
  bars: Sequence[dict[str, str]] = (),
  mark: tuple[str, str] | None = None,
  legend: Sequence[tuple[str, str]] = (),
  note: str = "",
) -> Markup:
  frame = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "right": RIGHT,
    "top": TOP,
    "bottom": BOTTOM,
  }
  axes = {
    "x": [_x_tick(_px(x.at(value)), value) for value in _ticks(x.low, x.high)],
    "y": [(_px(y.at(value)), _number(value)) for value in _ticks(y.low, y.high)],
  }
  drawn = {"curves": curves, "bars": bars, "mark": mark, "legend": legend, "note": note}
  texts = {"title": title, "x_label": labels[0], "y_label": labels[1], "description": description}
  return page.render("chart.html", axes=axes, **frame, **drawn, **texts)


def _x_tick(at: str, value: float) -> tuple[str, str, str, str]:
  """Returns the place of a tick, its label, and the label's place and anchor.

  The label of the last tick must stay inside the chart.
  """
  is_last = float(at) > RIGHT - 12
  return (
    at,
    _number(value),
    _px(min(float(at) + 10 * is_last, WIDTH)),
    "end" if is_last else "middle",
  )


def _classes(one: Series) -> str:
  if one.style is None:
    return "curve main"
  dash = (one.style + one.style // _COLOURS) % _DASHES if one.dash is None else one.dash
  return (
    f"curve c{one.style % _COLOURS}"
    + (f" d{dash}" if dash else "")
    + (" faint" if one.faint else "")
  )


def _curve(one: Series, x: Scale, y: Scale) -> dict[str, object]:
  pieces, places, gap = [], [], True
  for a, b in zip(one.x, one.y, strict=True):
    if not (np.isfinite(a) and np.isfinite(b)):
      gap = True
      continue
    place = (_px(x.at(float(a))), _px(y.at(float(b))))
    # A point between two gaps is a line of length 0, which round line ends show as a dot.
    pieces.append(f"M{' '.join(place)}h0" if gap else f"L{' '.join(place)}")
    places.append(place)
    gap = False
  return {
    "name": one.name,
    "classes": _classes(one),
    "path": "".join(pieces),
    "marks": places if one.marks else (),
  }


def _bar(x: Scale, y: Scale, low: float, high: float, count: int) -> dict[str, str]:
  top, left, right = y.at(count), x.at(low) + 0.5, x.at(high) - 0.5
  place = {"x": _px(left), "y": _px(top), "width": _px(right - left), "height": _px(BOTTOM - top)}
  return place | {"text": f"{low:.3g} to {high:.3g}: {count}"}


def _in_words(one: Series) -> str:
  _, y = _finite(one)
  return f"{one.name} from {y[0]:.3g} to {y[-1]:.3g}" if y.size else f"{one.name} without a value"
