"""Tests the README's commands for custom images, exactly as written, on a folder of images."""

import json
import pathlib
import re
import shlex

import numpy as np
from PIL import Image
import pytest
import runs

_ROOT = pathlib.Path(__file__).parents[2]


def _draw(path, label, rng):
  """Draws an image of a class, which is three colored stripes and a tilt. Images of a class differ
  in position, noise and size.
  """
  colours = np.random.default_rng([3, label]).integers(0, 255, (3, 3))
  tilt = label % 7 / 7
  height, width = rng.integers(60, 110, 2)
  y, x = np.mgrid[0:height, 0:width]
  stripe = ((y + tilt * x + rng.integers(0, 40)) // 14).astype(int) % 3
  image = colours[stripe] + rng.normal(0, 25, (height, width, 3))
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(path)


# The slow run is exactly as written. The other uses fewer steps, which are enough for these easy
# classes.
@pytest.mark.parametrize("shortened", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_train_evaluate_and_search(tmp_path, shortened):
  rng = np.random.default_rng(0)
  for label in range(40):
    for index in range(6):
      _draw(tmp_path / "IMAGES" / f"thing{label:02d}" / f"{index}.png", label, rng)
  section = (_ROOT / "README.md").read_text().split("## Use 1: your own images")[1]
  (block,) = re.findall(r"```bash\n(.*?)```", section.split("## ")[0], re.S)
  query = tmp_path / "IMAGES" / "thing07" / "3.png"
  commands = (
    block.replace("IMAGES/CLASS/PHOTO.png", str(query))
    .replace("=IMAGES", f"={tmp_path / 'IMAGES'}")
    .splitlines()
  )
  outputs, logs = [], []
  for command in commands:
    words = shlex.split(command.replace("runs/mine", str(tmp_path / "mine")))
    assert words[0] == "soprc"
    if shortened and words[1] == "train":
      words += ["--config.train.steps=50", "--config.eval.every=25"]
    done = runs.call("soprc_jax.cli", *words[1:], env=runs.environment())
    assert done.returncode == 0, done.stderr
    outputs.append(done.stdout)
    logs.append(done.stderr)
  results = json.loads((tmp_path / "mine" / "results.json").read_text())
  assert results["test"]["num_queries"] == 16 * 6
  assert results["test"]["mAUPRC"] > 0.5
  assert "Test mAUPRC to beat" in logs[0]
  best = max(values["mAUPRC"] for values in results["baselines"]["test"].values())
  assert ("does not beat the baselines" in logs[0]) == (results["test"]["mAUPRC"] <= best)
  assert f"test: mAUPRC {results['test']['mAUPRC']:.4f}" in outputs[1]
  rows = [line.split() for line in outputs[2].splitlines()[1:]]
  assert len(rows) == 10
  assert rows[0] == ["1.0000", "thing07", "thing07/3.png"]  # the query is among the images
  similarities = [float(row[0]) for row in rows]
  assert similarities == sorted(similarities, reverse=True)
  assert sum(row[1] == "thing07" for row in rows[1:6]) >= 2


def test_a_mistake_of_search(tmp_path):
  flags = [
    "--query=missing.png",
    f"--config={_ROOT / 'configs' / 'folder.py'}",
    f"--workdir={tmp_path}",
  ]
  done = runs.call("experiments.search", *flags)
  assert done.returncode == 1
  assert done.stderr == "Error: --query=missing.png: there is no such file\n"
