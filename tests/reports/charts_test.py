"""Tests that charts draw values where their axes say."""

import re

import numpy as np
import pytest

from soprc_jax.reports import charts


class TestCharts:
  def _points(self, text):
    (path,) = re.findall(r' d="(.*?)"', text)
    return [
      (command, float(x), float(y))
      for command, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)
    ]

  def test_values_lie_where_the_axes_say(self):
    x, y = np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 0.25])
    text = charts.line_chart(
      "t", [charts.Series("s", x, y)], x_label="x", y_label="y", x_range=(0, 10), y_range=(0, 1)
    )
    middle, quarter = (
      (charts.LEFT + charts.RIGHT) / 2,
      charts.BOTTOM - 0.25 * (charts.BOTTOM - charts.TOP),
    )
    assert self._points(text) == [
      ("M", charts.LEFT, charts.BOTTOM),
      ("L", middle, charts.TOP),
      ("L", charts.RIGHT, quarter),
    ]
    labels = {
      label: float(x)
      for x, label in re.findall(r'<text x="([\d.]+)" y="224".*?>([\d.,]+)</text>', text)
    }
    assert labels["4"] == pytest.approx(charts.LEFT + 0.4 * (charts.RIGHT - charts.LEFT), abs=0.06)

  def test_a_value_that_is_not_finite_is_a_gap(self):
    y = np.array([1.0, np.nan, 2.0, 3.0, np.inf])
    text = charts.line_chart("t", [charts.Series("s", np.arange(5.0), y)], x_label="x", y_label="y")
    assert [command for command, _, _ in self._points(text)] == ["M", "M", "L"]

  def test_no_values(self):
    series = [
      charts.Series("gone", np.arange(2.0), np.full(2, np.nan)),
      charts.Series("there", np.arange(2.0), np.ones(2)),
    ]
    assert "gone (no values)" in charts.line_chart("t", series, x_label="x", y_label="y")
    assert "No value" in charts.line_chart("t", series[:1], x_label="x", y_label="y")

  @pytest.mark.parametrize("y", [[0.0, 0.0], [3.0, 3.0], [-2.0, -2.0], [1e-7, 2e-7], [1e6, 5e6]])
  def test_any_range_fits_the_picture(self, y):
    text = charts.line_chart(
      "t", [charts.Series("s", np.arange(2.0), np.array(y))], x_label="x", y_label="y"
    )
    assert all(charts.TOP <= at <= charts.BOTTOM for _, _, at in self._points(text))
    assert text.count("<text") >= 6

  def test_bars_have_the_height_of_their_count(self):
    text = charts.histogram(
      "t",
      np.array([0.1, 0.1, 0.9, np.nan]),
      edges=np.array([0.0, 0.5, 1.0]),
      x_label="x",
      y_label="y",
    )
    heights = [float(height) for height in re.findall(r'<rect .*?height="([\d.]+)"', text)]
    assert heights[0] == pytest.approx(2 * heights[1], rel=0.01)
    assert "0 to 0.5: 2" in text
    assert "no value" in charts.histogram(
      "t", np.array([np.nan]), edges=np.array([0.0, 1.0]), x_label="x", y_label="y"
    )

  def test_long_curves_become_means(self):
    x, y, size = charts.thinned(np.arange(1, 10_001), np.arange(10_000.0))
    assert (len(x), size) == (400, 25)
    assert y[0] == np.arange(25).mean()
    assert x[-1] == np.arange(9976, 10_001).mean()

  def test_texts_are_escaped_and_curves_differ_without_colour(self):
    series = [charts.Series(f"<{i}>", np.arange(2.0), np.arange(2.0), i) for i in range(12)]
    text = charts.line_chart("<t>", series, x_label="<x>", y_label="<y>", marked=(0.5, "<m>"))
    assert not re.search(r"<[txym\d]>", text)
    assert (
      len({re.search(rf'<path class="([^"]*)"[^>]*><title>&lt;{i}', text)[1] for i in range(12)})
      == 12
    )
