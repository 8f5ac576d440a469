"""Tests devices and processes."""

import ast

import chex
import jax
import numpy as np
import pytest
import runs
import toys

from soprc_jax.training import parallel


class TestParallel:
  def test_batch_size_that_the_devices_do_not_divide(self):
    parallel.check_batch(8, 4, 0)
    parallel.check_batch(24, 4, 6)
    with pytest.raises(
      ValueError, match=r"train\.batch_size=21 is not divisible by 2 devices: use 18 or 24"
    ):
      parallel.check_batch(21, 3, 0)  # both fit classes of three too
    with pytest.raises(ValueError, match=r"use 18$"):
      parallel.check_batch(9, 9, 0)
    with pytest.raises(
      ValueError, match=r"train\.microbatch=3 is not divisible by 2 devices: use 2 or 4"
    ):
      parallel.check_batch(24, 4, 3)

  def test_one_place_names_pmap(self):
    named = []
    for path in [
      path
      for folder in ("soprc_jax", "experiments", "configs")
      for path in (runs.ROOT / folder).rglob("*.py")
    ]:
      for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
          names = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
          named += [(path.name, function.name)] * names.count("pmap")
    assert named == [("parallel.py", "compile_step")]

  def test_replicate_and_back(self):
    tree = {"a": np.arange(3, dtype=np.float32), "b": (np.int32(4), np.zeros((2, 0), np.int8))}
    stacked = parallel.replicate(tree)
    assert stacked["a"].shape == (toys.NUM_DEVICES, 3)
    got = parallel.unreplicate(stacked)
    chex.assert_trees_all_equal(got, tree)
    chex.assert_trees_all_equal_dtypes(got, tree)

  def test_unreplicated_arrays_are_copies(self):
    # The step donates its buffers. A checkpoint in progress must not see the next step in them.
    toy = toys.make(devices=toys.NUM_DEVICES)
    state = parallel.replicate(toy.initial())
    kept = parallel.unreplicate(state)
    before = jax.tree.map(np.copy, kept)
    state, _ = toy.step(state, parallel.shard(toys.make_batch(0)))
    jax.block_until_ready(state)
    chex.assert_trees_all_equal(kept, before)

  def test_each_device_has_its_part_of_the_batch(self):
    batch = toys.make_batch()
    parts = parallel.shard(batch)
    assert parts["image"].shape == (
      toys.NUM_DEVICES,
      toys.BATCH // toys.NUM_DEVICES,
      toys.SIZE,
      toys.SIZE,
      3,
    )
    np.testing.assert_array_equal(np.concatenate(parts["image"]), batch["image"])

  def test_alone_there_is_nothing_to_wait_for(self):
    parallel.wait_for_all("nobody")
    parallel.check_equal("the text", "any")
    rows = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(parallel.gather_rows(rows), rows)
    assert parallel.is_main()
