"""Tests the model of a run: its digest and its config."""

import networks
import numpy as np
import pytest

from soprc_jax.serving import network


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.fixture(scope="module")
def loaded(made):
  return network.load(made[1])


def test_the_digest_knows_every_array(loaded):
  params = loaded.variables["params"]
  kernel = params["head"]["kernel"].copy()
  kernel.view(np.uint8)[0, 0] ^= 1
  for changed in (
    {**params, "head": {**params["head"], "kernel": kernel}},
    {**params, "head": {**params["head"], "kernel": params["head"]["kernel"].reshape(8, -1)}},
    {**params, "tail": params["head"]},
  ):
    assert network.digest({**loaded.variables, "params": changed}) != loaded.digest
  again = {key: loaded.variables[key] for key in sorted(loaded.variables, reverse=True)}
  assert network.digest(again) == loaded.digest


def test_the_config_is_that_of_the_run(made, loaded, tmp_path):
  assert loaded.config.to_dict() == networks.config(made[0]).to_dict()
  assert network.load(made[1], networks.config(tmp_path)).config.data.root == str(
    tmp_path
  )  # other images
  with pytest.raises(
    ValueError,
    match=r"the config differs from that of the run(.|\n)*model\.embedding_dim: 8 there, 4 here",
  ):
    network.load(made[1], networks.config(**{"model.embedding_dim": 4}))
  with pytest.raises(ValueError, match="holds no run"):
    network.load(tmp_path)
  (tmp_path / "config.json").write_text('{"model": {"width": "wide"}}')
  with pytest.raises(
    ValueError,
    match=r"config\.json: this is not the config of a run|config\.json: the config does not work",
  ):
    network.load(tmp_path)
