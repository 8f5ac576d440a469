"""Tests what a run logs at its start; `loop_test` tests its records."""

import logging
import types

import numpy as np
import runs

from soprc_jax.data import features
from soprc_jax.training import run_log


def _start(caplog, monkeypatch, split, **values):
  """Returns the messages at the start of a run on a split."""
  monkeypatch.setattr(logging.getLogger("soprc_jax"), "propagate", True)
  sampler = types.SimpleNamespace(num_small=2, unit="classes")
  data = types.SimpleNamespace(splits={"train": split}, patterns=None, sampler=sampler)
  config = runs.tiny_config()
  config.data.update(values)
  with caplog.at_level(logging.INFO, logger="soprc_jax"):
    run_log.describe_start(config, data, {}, 0, 5, "run")
  return "\n".join(caplog.messages)


def _vectors(**more):
  return features.Features(np.eye(4, dtype=np.float32), [0, 1, 2, 0], list("abcd"), **more)


def test_the_number_of_superclasses_is_told(caplog, monkeypatch):
  split = _vectors(superclasses={0: "bird", 1: "fish", 2: "bird", 3: "of no class here"})
  told = _start(caplog, monkeypatch, split)
  assert "train: 3 classes of 2 superclasses, 4 images." in told


def test_vectors_are_no_images(caplog, monkeypatch):
  told = _start(caplog, monkeypatch, _vectors(), source="features")
  assert "Data features: train: 3 classes, 4 vectors." in told
  assert "2 training classes have fewer than" in told
  assert "image" not in told
