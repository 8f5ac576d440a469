"""The README's example of a loss of one's own, as it stands there, trains from outside the package."""

import json
import os
import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]


def test_the_readme_example_trains(tmp_path):
  readme = (_ROOT / "README.md").read_text()
  (code,) = re.findall(r"```python\n(# my_losses\.py.*?)```", readme, re.S)
  (tmp_path / "my_losses.py").write_text(code)
  command = [sys.executable, "-m", "experiments.train", "--config=configs/glyphs.py:smoke", f"--workdir={tmp_path / 'run'}"]
  environment = os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{tmp_path}", "XLA_FLAGS": ""}
  done = subprocess.run(
    [*command, "--config.loss.name=my_losses:make"], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert results["config"]["loss"]["name"] == "my_losses:make"
  losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
  assert len(losses) == 4
  assert all(-2 <= loss <= 2 for loss in losses)
