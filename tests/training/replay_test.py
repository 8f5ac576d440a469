"""A kept step that is missing or damaged."""

import pytest

from soprc_jax.training import replay


def test_a_folder_without_a_kept_step_is_told(tmp_path):
  with pytest.raises(ValueError, match="keeps no step that was not finite"):
    replay.load(tmp_path)


def test_damaged_reproductions_are_told(tmp_path):
  folder = tmp_path / "diverged" / "3"
  folder.mkdir(parents=True)
  for content in (
    "",
    "[]",
    "{}",
    '{"step": 3, "config": {}, "class_counts": 5}',
    '{"step": 3, "config": {"seed": "x"}}',
  ):
    (folder / "report.json").write_text(content)
    with pytest.raises(ValueError, match=r"report\.json is corrupt|report\.json"):
      replay.load(tmp_path)
  with pytest.raises(ValueError, match=r"--step=4: .* keeps 3"):
    replay.load(tmp_path, step=4)
