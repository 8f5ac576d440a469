"""Tests the numbers that the paper reports for each data set."""

from soprc_jax.reports import paper_numbers
from soprc_jax.training import methods


class TestPaper:
  def test_of_each_data_set(self):
    for source, first in (
      ("sop", 62.75),
      ("tfds_sop", 62.75),
      ("inaturalist", 36.16),
      ("vehicle_id", 74.92),
    ):
      table = paper_numbers.reported(source, trainval=False)
      assert table.rows["soprc"][0] == first
      assert set(table.rows) <= set(methods.METHODS)
      assert {len(row) for row in table.rows.values()} == {len(table.metrics)}
    assert paper_numbers.reported("inaturalist", trainval=True).rows["soprc"] == (
      37.31,
      69.23,
      83.41,
      91.29,
      93.81,
    )

  def test_lists_of_vehicle_id(self):
    found = {
      split: paper_numbers.reported("vehicle_id", trainval=False, split=split)
      for split in ("test", "test_medium", "test_small")
    }
    assert [table.rows["soprc"][0] for table in found.values()] == [74.92, 79.00, 83.11]
    assert "erratum 11" in found["test"].note
    assert found["test_small"].note == ""
    assert paper_numbers.reported("vehicle_id", trainval=False, split="test_one_per_class") is None

  def test_other_data_have_none(self):
    assert paper_numbers.reported("glyphs", trainval=False) is None
    assert not paper_numbers.has("folder")
