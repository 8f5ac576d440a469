"""Tests JSON files that are read back, including corrupt ones and ones of another shape."""

import broken_json
import hypothesis
import pytest

from soprc_jax._internal import stored

SHAPE = {"a": float, "b": [{"c": (str, None)}], "d": {str: int}}


class TestFiles:
  @pytest.mark.parametrize("content", broken_json.BROKEN)
  def test_what_is_no_json(self, tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(
      ValueError,
      match=r"x.json is corrupt \((.|\n)*\): remove it, and it is computed again",
    ):
      stored.read_json(path)

  @pytest.mark.parametrize(
    ("content", "told"),
    [
      ({"a": 1, "b": [{"c": None}], "d": {}}, ""),
      ({"a": 0.5, "b": [{"c": "x"}, {"c": None, "more": 3}], "d": {"x": 1}}, ""),
      ({"a": True, "b": [{"c": "x"}], "d": {}}, "a must be a number, it is True"),
      ({"a": 1, "b": [], "d": {}}, "b must be a list with entries, it is []"),
      ({"a": 1, "b": [{"c": "x"}, {}], "d": {}}, "b[1].c is missing"),
      ({"a": 1, "b": [{"c": 3}], "d": {}}, "b[0].c must be null, it is 3"),
      ({"a": 1, "b": [{"c": "x"}], "d": {"y": 1.5}}, "d.y must be an integer, it is 1.5"),
      ([], "it must be an object, it is []"),
    ],
  )
  def test_shapes(self, content, told):
    assert stored.problem(content, SHAPE) == told

  @hypothesis.given(
    content=broken_json.replaced({"a": 1.5, "b": [{"c": "x"}, {"c": None}], "d": {"x": 1}})
  )
  def test_a_problem_is_found_exactly_where_there_is_one(self, content):
    def fits():
      right = (
        isinstance(content, dict)
        and type(content["a"]) in (int, float)
        and isinstance(content["b"], list)
      )
      entries = (
        right
        and len(content["b"]) > 0
        and all(type(entry["c"]) in (str, type(None)) for entry in content["b"])
      )
      return (
        entries
        and isinstance(content["d"], dict)
        and all(type(value) is int for value in content["d"].values())
      )

    try:
      right = fits()
    except (KeyError, TypeError, IndexError):
      right = False
    assert (stored.problem(content, SHAPE) == "") == right
