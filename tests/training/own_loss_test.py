"""Tests that the custom loss of the docs trains from outside the package, exactly as written.

Its interface is training/loss_protocol.py.
"""

import json
import os
import re

import chex
import crashes
import numpy as np
import runs

import soprc_jax
from soprc_jax.training import build


def _write_example(name, folder):
  page = (runs.ROOT / "docs" / "training_runs.md").read_text()
  (code,) = re.findall(rf"```python\n(# {name}\.py.*?)```", page, re.S)
  (folder / f"{name}.py").write_text(code)


def test_the_example_trains(tmp_path):
  _write_example("my_losses", tmp_path)
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


def test_an_example_with_parameters_resumes_and_its_model_starts_another_run(tmp_path, monkeypatch):
  _write_example("my_proxies", tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  values = {"loss.name": "my_proxies:make", "loss.proxy_multiplier": 10.0}
  sizes = {"steps": 9, "warmup_steps": 2}
  path = f"{runs.ROOT}{os.pathsep}{tmp_path}"
  env = runs.environment(**{"PYTHONPATH": path})
  one, two = (runs.tiny_flags(tmp_path / name, **sizes, **values) for name in ("one", "two"))
  done = runs.call("experiments.train", *one, env=env)
  assert done.returncode == 0, done.stderr
  monkeypatch.setattr(runs, "environment", lambda devices=1: env)
  assert runs.start_and_kill(two, lambda _: crashes.left(tmp_path / "two")["checkpoints"] == [4])
  done = runs.call("experiments.train", *two, env=env)
  assert done.returncode == 0, done.stderr
  assert "Resuming from step 4" in done.stderr
  assert runs.metrics(tmp_path / "one") == runs.metrics(tmp_path / "two")
  found = [runs.states(tmp_path / name, **sizes, **values) for name in ("one", "two")]
  chex.assert_trees_all_equal(*found)
  learned = {key: leaf for key, leaf in found[0].items() if ".loss_params" in key}
  assert len(learned) == 4  # two arrays in the newest and in the best checkpoint

  # Another run starts from the model, and a use of it reads the model alone.
  config = runs.tiny_config(**{"model.init_from": str(tmp_path / "one")})
  parts = build.make_parts(config, np.full(7, 4))
  state = build.starting_state(config, parts)
  key = "['head']['kernel']"
  np.testing.assert_array_equal(state.params["head"]["kernel"], found[0][f"best.params{key}"])
  assert state.loss_params == ()
  model = soprc_jax.load(tmp_path / "one")
  assert model.embed(np.zeros((2, 16, 16, 3), np.uint8)).shape == (2, 16)
