"""Runs a function on two devices under jax.pmap or jax.shard_map, for the tests of `axis_name`."""

import jax
import numpy as np

AXIS = "devices"
NUM_DEVICES = 2
KINDS = [("pmap", "pmap"), ("shard_map", "shard_map")]


def on_devices(function, kind):
  """Maps ``function`` over the leading axis (of size 2) of all arguments. Results are stacked in
  the same way.
  """
  devices = jax.devices()[:NUM_DEVICES]
  assert len(devices) == NUM_DEVICES, "tests/conftest.py asks for two CPU devices"
  if kind == "pmap":
    return jax.pmap(function, axis_name=AXIS, devices=devices)

  def one_block(*arguments):
    results = function(*jax.tree.map(lambda block: block[0], arguments))
    return jax.tree.map(lambda result: result[None], results)

  mesh, spec = jax.sharding.Mesh(np.array(devices), (AXIS,)), jax.sharding.PartitionSpec(AXIS)
  # check_vma=True would already sum the gradients of replicated parameters.
  return jax.jit(
    jax.shard_map(one_block, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  )


def split(array):
  """Returns contiguous halves of the leading axis, ``[2, n / 2, ...]``."""
  array = np.asarray(array)
  return array.reshape(NUM_DEVICES, -1, *array.shape[1:])


def replicate(tree):
  """Repeats every array once per device."""
  return jax.tree.map(lambda array: np.stack([np.asarray(array)] * NUM_DEVICES), tree)
