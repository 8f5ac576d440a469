"""Tests models of other libraries as backbones."""

import json
import re
import sys

import jax
import numpy as np
import own_backbones
import pytest
import runs

import soprc_jax
from soprc_jax.models import adapter
from soprc_jax.training import build, loop
from soprc_jax.training import config as config_lib


def _config(name, **values):
  return runs.tiny_config(**{"model.name": f"own_backbones:{name}", "warmup.steps": 0, **values})


def test_a_run_with_a_backbone_of_two_functions(tmp_path):
  config = _config("linear", **{"train.microbatch": 4, "model.freeze_bn": False}, steps=3)
  results = loop.train(config, tmp_path / "run")
  model = soprc_jax.load(tmp_path / "run")
  start = build.starting_state(config, build.make_parts(config, np.full(9, 4)))
  kernel = model.network.variables["params"]["backbone"]["adapted"]["layer"]["kernel"]
  assert kernel.shape == (48, config.model.width)
  assert np.any(kernel != start.params["backbone"]["adapted"]["layer"]["kernel"])
  images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
  found = model.embed(images)
  cells = (images / 255 - 0.5) / 0.5
  cells = cells.reshape(3, 4, 4, 4, 4, 3).mean((2, 4)).reshape(3, 48)
  head = model.network.variables["params"]["head"]
  expected = np.tanh(cells @ kernel) @ head["kernel"] + head["bias"]
  expected /= np.linalg.norm(expected, axis=1, keepdims=True)
  assert model.network.image_size == 16
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert 0 < results["test"]["mAUPRC"] < 1


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
  page = (runs.ROOT / "docs" / "howto" / "pretrained.md").read_text(encoding="utf-8")
  (code,) = re.findall(r"```python\n((?:(?!```).)*def linear\(config\).*?)```", page, re.S)
  (tmp_path / "zoo_of_page.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  config = runs.tiny_config(**{"model.name": "zoo_of_page:linear", "model.embedding_dim": 0})
  network = build.make_model(config, freeze_bn=True)
  images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
  variables = network.init(jax.random.key(0), images)
  params = jax.tree.map(np.asarray, variables["params"]["backbone"]["adapted"])
  expected = (images.reshape(3, -1) / 127.5 - 1) @ params["kernel"]  # its bias is 0
  expected /= np.linalg.norm(expected, axis=1, keepdims=True)
  np.testing.assert_allclose(network.apply(variables, images), expected, atol=1e-4)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("own_backbones:missing", "cannot be imported: AttributeError"),
    ("no_such_module:make", "cannot be imported: ModuleNotFoundError"),
    ("own_backbones:equimo_model", "is no function that is marked with @soprc_jax"),
    ("resnet19", "must be one of conv3, .*, or package.module:function"),
  ],
)
def test_a_wrong_name_is_an_error(name, message):
  with pytest.raises(ValueError, match=rf"model\.name.*{message}"):
    runs.tiny_config(**{"model.name": name})


def test_a_function_that_returns_something_else_is_an_error():
  with pytest.raises(TypeError, match=r"own_backbones:nothing must return .*Backbone; got dict"):
    build.make_model(_config("nothing"), freeze_bn=True)
  with pytest.raises(ValueError, match=r"features \[B, F\], B=1; got \(1,\)"):
    build.abstract_network(_config("flat"))


def test_a_run_does_not_choose_what_is_imported(tmp_path):
  """The config of a folder names code; loading the folder does not import it."""
  tree = json.loads(config_lib.to_json(_config("linear")))
  assert config_lib.from_json(tree).model.name == "own_backbones:linear"  # imported above
  tree["model"]["name"] = "antigravity:fly"
  with pytest.raises(ValueError, match=r"antigravity:fly.*does not import on its own: import"):
    config_lib.from_json(tree)
  assert "antigravity" not in sys.modules
  tree["model"]["name"] = "sys:exit"
  with pytest.raises(ValueError, match="sys:exit' is no function that is marked"):
    config_lib.from_json(tree)


class TestEquimo:
  @pytest.fixture(autouse=True)
  def _needs_equimo(self):
    pytest.importorskip("equimo")

  def test_features_and_gradient_are_those_of_the_module(self):
    made = adapter.make(_config("tiny_equimo").model)
    module = adapter.Adapter(made)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    variables = module.init(jax.random.key(1), images)
    found = module.apply(variables, images)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      model = own_backbones.equimo_model()
      expected = [own_backbones.class_token(model, image.transpose(2, 0, 1)) for image in images]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-5)
    slopes = jax.grad(lambda variables: module.apply(variables, images).var())(variables)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(slopes)) > 0

  def test_a_run(self, tmp_path):
    config = _config("tiny_equimo", **{"data.image_size": 32, "eval.image_size": 32}, steps=2)
    loop.train(config, tmp_path / "run")
    model = soprc_jax.load(tmp_path / "run")
    vectors = model.embed(np.zeros((2, 32, 32, 3), np.uint8))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    params = model.network.variables["params"]["backbone"]["adapted"]
    assert any(".attn." in name for name in params)
