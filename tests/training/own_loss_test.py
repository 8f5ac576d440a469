"""Tests that the custom loss of the docs trains from outside the package, exactly as written.

Its interface is training/loss_protocol.py.
"""

import json
import os
import re

import runs


def test_the_example_trains(tmp_path):
  page = (runs.ROOT / "docs" / "training_runs.md").read_text()
  (code,) = re.findall(r"```python\n(# my_losses\.py.*?)```", page, re.S)
  (tmp_path / "my_losses.py").write_text(code)
  flags = runs.tiny_flags(
    tmp_path / "run", steps=4, warmup_steps=0, **{"loss.name": "my_losses:make"}
  )
  path = f"{runs.ROOT}{os.pathsep}{tmp_path}"
  done = runs.call("experiments.train", *flags, env=runs.environment(**{"PYTHONPATH": path}))
  assert done.returncode == 0, done.stderr
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert results["config"]["loss"]["name"] == "my_losses:make"
  losses = [
    json.loads(line)["loss"]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  ]
  assert len(losses) == 4
  assert all(-2 <= loss <= 2 for loss in losses)
