"""Tests objectives: the kinds of prior, schedules, and SOPRC's loss from the public functions."""

import sys

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soprc_jax import (
  interpolate_scores,
  losses,
  positive_pull,
  retrieval_lists,
  semi_variance,
  soprc_loss,
  tracking,
)
from soprc_jax.training import config as config_lib
from soprc_jax.training import objectives

_COUNTS = np.array([4, 8, 2, 6])
_LABELS = np.array([0, 1, 0, 3, 1, 1])
_ROWS, _DIM = len(_LABELS), 5


def _loss_config(**values):
  config = config_lib.default_config()
  values = {f"loss.{key.replace('__', '.')}": value for key, value in values.items()}
  config.update_from_flattened_dict({"loss.num_points": 6, **values})
  return config_lib.resolve(config).loss


def _setting(num_steps=10):
  return objectives.Setting(
    class_counts=_COUNTS, num_steps=num_steps, max_positives=2, axis_name=None, embedding_dim=_DIM
  )


def _embeddings(seed=0):
  vectors = np.random.default_rng(seed).standard_normal((_ROWS, _DIM))
  return jnp.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _inputs(objective, *, step=0, where=None, updates=2):
  """Returns inputs after some updates of the carried state with other scores."""
  tx = optax.chain(objective.tracker, optax.identity())
  state = tx.init({"w": jnp.zeros(1)})
  where = jnp.ones(_ROWS, bool) if where is None else jnp.array(where)
  labels, params = jnp.array(_LABELS), objective.init_params(jax.random.key(0))
  for seed in range(1, updates + 1):
    inputs = objectives.Inputs(_embeddings(seed), labels, where, jnp.int32(0), state, params)
    _, state = tx.update({"w": jnp.zeros(1)}, state, **objective.compute(inputs).update_args)
  return objectives.Inputs(_embeddings(0), labels, where, jnp.int32(step), state, params), tx


def _found(where=None):
  return retrieval_lists(_embeddings(0), _LABELS, max_positives=2, where=where)


class LogLinearTest(chex.TestCase):
  def test_values(self):
    schedule = objectives.anneal(0.5, 0.005, 100)
    got = [float(schedule(step)) for step in (0, 50, 100, 1000)]
    np.testing.assert_allclose(got, [0.5, 0.05, 0.005, 0.005], rtol=1e-5)
    np.testing.assert_allclose(schedule(25), 0.5 ** (3 / 4) * 0.005 ** (1 / 4), rtol=1e-5)

  def test_zero_start_means_constant(self):
    schedule = objectives.anneal(0.0, 0.3, 100)
    np.testing.assert_allclose([schedule(0), schedule(70)], 0.3, rtol=1e-6)

  def test_ends_of_several_queries(self):
    ends = jnp.array([0.1, 0.001])
    np.testing.assert_allclose(
      objectives.anneal(0.4, ends, 10)(5), np.sqrt(0.4 * np.array([0.1, 0.001])), rtol=1e-5
    )

  def test_phase_of_no_steps_is_finite(self):
    self.assertTrue(np.isfinite(objectives.anneal(0.4, 0.1, 0)(0)))


class AnnealTest(parameterized.TestCase):
  @parameterized.parameters(
    ("log", 1.0, 0.5**0.75 * 0.02**0.25, 0.1, 0.02),
    ("linear", 1.0, 0.38, 0.26, 0.02),
    ("cosine", 1.0, 0.5 * (0.02 / 0.5) ** ((1 - np.cos(np.pi / 4)) / 2), 0.1, 0.02),
    ("log", 0.5, 0.1, 0.02, 0.02),
  )
  def test_shapes(self, shape, until, quarter, half, end):
    schedule = objectives.anneal(0.5, 0.02, 100, shape=shape, until=until)
    got = [float(schedule(step)) for step in (0, 25, 50, 100, 200)]
    np.testing.assert_allclose(got, [0.5, quarter, half, end, 0.02], rtol=1e-5)

  def test_the_prior_has_shape_and_length_of_the_config(self):
    config = _loss_config(
      prior__kind="constant",
      prior__value=0.1,
      prior__start=0.5,
      prior__shape="linear",
      prior__until=0.5,
    )
    prior = objectives.make_prior(config.prior, _setting(num_steps=8))
    got = [float(prior(jnp.int32(step), jnp.array(_LABELS), _found())[0]) for step in (0, 2, 4, 8)]
    np.testing.assert_allclose(got, [0.5, 0.3, 0.1, 0.1], rtol=1e-6)


class PriorTest(chex.TestCase):
  def _prior(self, step=0, where=None, **values):
    config = _loss_config(**{f"prior__{key}": value for key, value in values.items()}).prior
    return objectives.make_prior(config, _setting())(
      jnp.int32(step), jnp.array(_LABELS), _found(where)
    )

  def test_f34_frequency_is_the_share_of_the_query_positives(self):
    # c - 1 positives among the N - 1 other training images, N = 20.
    want = (_COUNTS[_LABELS] - 1) / 19
    np.testing.assert_allclose(self._prior(kind="frequency"), want, rtol=1e-6)

  def test_scaled_by_the_largest_class(self):
    np.testing.assert_allclose(
      self._prior(kind="scaled", value=0.1), 0.1 * _COUNTS[_LABELS] / 8, rtol=1e-6
    )

  def test_constant(self):
    np.testing.assert_allclose(
      self._prior(kind="constant", value=0.03), np.full(_ROWS, 0.03), rtol=1e-6
    )

  def test_batch_is_each_lists_own_share(self):
    np.testing.assert_allclose(self._prior(kind="batch")[:3], [1 / 5, 2 / 5, 1 / 5], rtol=1e-6)

  def test_batch_does_not_count_masked_images(self):
    where = np.array([1, 1, 1, 0, 1, 0], bool)
    np.testing.assert_allclose(self._prior(kind="batch", where=where)[:3], [1 / 3] * 3, rtol=1e-6)

  def test_start_goes_log_linearly_to_each_querys_own(self):
    end = np.float64(self._prior(kind="scaled", value=0.1))
    got = [self._prior(step, kind="scaled", value=0.1, start=0.5) for step in (0, 5, 10, 99)]
    np.testing.assert_allclose(got, [np.full(_ROWS, 0.5), np.sqrt(0.5 * end), end, end], rtol=1e-5)

  def test_is_positive_for_a_class_of_one_image_and_a_list_without_positives(self):
    setting = _setting()._replace(class_counts=np.array([1, 8, 2, 6]))
    for kind in objectives.PRIOR_KINDS:
      prior = objectives.make_prior(_loss_config(prior__kind=kind, prior__value=0.1).prior, setting)
      values = prior(jnp.int32(0), jnp.array(_LABELS), _found())
      self.assertTrue(np.all(np.asarray(values) > 0), kind)


class SoprcTest(chex.TestCase):
  """Tests the minimized loss against one composed by hand."""

  def _risk(self, config, v, prior, tau1, link="share"):
    found = _found()
    return soprc_loss(
      found.positive_scores,
      found.negative_scores,
      v,
      prior=prior,
      tau1=tau1,
      tau2=config.tau2,
      positive_where=found.positive_where,
      negative_where=found.negative_where,
      self_weight=config.self_weight,
      tpr_gradient=config.tpr_gradient,
      link=link,
    )

  def _variance(self, config):
    found = _found()
    return semi_variance(
      found.positive_scores,
      found.negative_scores,
      lambda1=config.lambda1,
      lambda2=config.lambda2,
      positive_where=found.positive_where,
      negative_where=found.negative_where,
      average_over=config.average_over,
      pool=config.pool,
      mean_gradient=config.mean_gradient,
    )

  @parameterized.parameters(*config_lib.PRESETS)
  def test_presets(self, preset):
    config = _loss_config(preset=preset, lambda1=0.5, lambda2=2.0)
    objective = objectives.make_objective("soprc", config, _setting())
    inputs, tx = _inputs(objective)
    outputs = objective.compute(inputs)
    _, after = tx.update({"w": jnp.zeros(1)}, inputs.opt_state, **outputs.update_args)
    stored = tracking.find_state(after)
    prior = {
      "default": 0.1 * _COUNTS / 8,
      "authors": 0.1 * _COUNTS / 8,
      "paper": (_COUNTS - 1) / 19,
    }[preset]
    want = self._risk(config, stored.v[_LABELS], prior[_LABELS].astype(np.float32), config.tau1)
    np.testing.assert_allclose(outputs.metrics["soprc"], want, rtol=1e-5)
    np.testing.assert_allclose(outputs.loss, want + self._variance(config), rtol=1e-5)
    # At the start, debiased weights grow from 0. An explicit start has weight 1.
    visited = (1 - 0.9**3) if preset == "default" else 1.0
    np.testing.assert_allclose(stored.weight[:2], visited, rtol=1e-5)

  def test_the_pull_is_added_with_its_weight(self):
    outputs = []
    for weight, step in ((0.0, 10), (3.0, 10), (3.0, 0), (3.0, 5)):
      objective = objectives.make_objective("soprc", _loss_config(pull=weight), _setting())
      outputs.append(objective.compute(_inputs(objective, step=step)[0]))
    found = _found()
    want = positive_pull(found.positive_scores, positive_where=found.positive_where)
    np.testing.assert_allclose(outputs[1].metrics["positive_pull"], want, rtol=1e-6)
    gains = [float(one.loss - outputs[0].loss) for one in outputs[1:]]
    np.testing.assert_allclose(gains, [3 * want, 0, 1.5 * want], rtol=1e-5, atol=1e-6)
    self.assertNotIn("positive_pull", outputs[0].metrics)

  def test_wide_is_the_weight_of_the_risk_at_a_tau1_of_1(self):
    outputs = []
    for wide, tau1 in ((0.0, 0.1), (0.0, 1.0), (0.25, 0.1)):
      objective = objectives.make_objective("soprc", _loss_config(wide=wide, tau1=tau1), _setting())
      outputs.append(objective.compute(_inputs(objective)[0]))
    narrow, far, both = (float(one.loss) for one in outputs)
    self.assertGreater(abs(far - narrow), 0.02)
    np.testing.assert_allclose(both, 0.75 * narrow + 0.25 * far, rtol=1e-5)
    chex.assert_trees_all_close(outputs[2].metrics, outputs[0].metrics, rtol=1e-6)

  def test_link_changes_the_loss_and_no_metric(self):
    outputs, config = {}, {}
    for link in ("share", "log"):
      config[link] = _loss_config(link=link, v="batch", prior__kind="constant", prior__value=0.01)
      objective = objectives.make_objective("soprc", config[link], _setting())
      outputs[link] = objective.compute(_inputs(objective)[0])
    v = interpolate_scores(
      _found().positive_scores, num_points=6, bounds=(-1, 1), where=_found().positive_where
    )
    arguments = (config["log"], v, np.float32(0.01), config["log"].tau1)
    want = self._risk(*arguments, link="log")
    self.assertGreater(float(want), 1.5)
    np.testing.assert_allclose(outputs["log"].loss, want + self._variance(config["log"]), rtol=1e-5)
    np.testing.assert_allclose(outputs["log"].metrics["soprc"], self._risk(*arguments), rtol=1e-5)
    chex.assert_trees_all_close(outputs["log"].metrics, outputs["share"].metrics, rtol=1e-6)

  def test_v_of_the_batch_carries_nothing(self):
    config = _loss_config(v="batch")
    objective = objectives.make_objective("soprc", config, _setting())
    inputs, _ = _inputs(objective)
    outputs = objective.compute(inputs)
    found = _found()
    v = interpolate_scores(
      found.positive_scores, num_points=6, bounds=(-1, 1), where=found.positive_where
    )
    want = self._risk(config, v, np.float32(0.1 * _COUNTS / 8)[_LABELS], config.tau1)
    np.testing.assert_allclose(outputs.metrics["soprc"], want, rtol=1e-5)
    self.assertEqual(outputs.update_args, {})
    self.assertEqual(objective.idle_args(inputs), {})
    self.assertEmpty(jax.tree.leaves(inputs.opt_state))

  def test_tau1_schedule(self):
    config = _loss_config(tau1=0.03, tau1_start=0.3, lambda1=0.0, lambda2=0.0)
    objective = objectives.make_objective("soprc", config, _setting())
    losses_by_step = []
    for step, tau1 in ((0, 0.3), (5, 0.09486833), (10, 0.03)):
      inputs, _ = _inputs(objective, step=step)
      outputs = objective.compute(inputs)
      np.testing.assert_allclose(outputs.metrics["tau1"], tau1, rtol=1e-5)
      losses_by_step.append(float(outputs.loss))
    self.assertLen(set(losses_by_step), 3)

  def test_without_lambdas_the_variance_is_left_out(self):
    objective = objectives.make_objective(
      "soprc", _loss_config(lambda1=0.0, lambda2=0.0), _setting()
    )
    outputs = objective.compute(_inputs(objective)[0])
    self.assertNotIn("semi_variance", outputs.metrics)
    self.assertEqual(outputs.loss, outputs.metrics["soprc"])

  def test_idle_arguments_leave_rows_and_weights_alone(self):
    objective = objectives.make_objective("soprc", _loss_config(), _setting())
    inputs, tx = _inputs(objective)
    _, after = tx.update({"w": jnp.zeros(1)}, inputs.opt_state, **objective.idle_args(inputs))
    before, after = tracking.find_state(inputs.opt_state), tracking.find_state(after)
    np.testing.assert_array_equal(after.v, before.v)
    np.testing.assert_array_equal(after.weight, before.weight)

  def test_valid_lists_are_counted(self):
    objective = objectives.make_objective("soprc", _loss_config(), _setting())
    where = [True, True, True, True, True, False]
    for mask, want in ((None, 5), (where, 4), ([False] * 6, 0)):
      outputs = objective.compute(_inputs(objective, where=mask)[0])
      self.assertEqual(outputs.metrics["valid_lists"], want)
      self.assertTrue(np.isfinite(outputs.loss))

  @parameterized.parameters((1e-5, 1.0), (1.0, 0.0))
  def test_saturated_lists(self, prior, want):
    # A tiny prior saturates every list. Prior 1 saturates none, since its risk is 0. The list of
    # the masked image does not count.
    config = _loss_config(prior__kind="constant", prior__value=prior)
    objective = objectives.make_objective("soprc", config, _setting())
    outputs = objective.compute(_inputs(objective, where=[True, True, True, True, True, False])[0])
    self.assertEqual(outputs.metrics["saturated_lists"], want)

  def test_half_of_the_lists_saturated(self):
    config = _loss_config(prior__kind="constant", prior__value=0.62, tau1=0.03)
    objective = objectives.make_objective("soprc", config, _setting())
    inputs, tx = _inputs(objective)
    outputs = objective.compute(inputs)
    _, after = tx.update({"w": jnp.zeros(1)}, inputs.opt_state, **outputs.update_args)
    found = _found()
    risks = soprc_loss(
      found.positive_scores,
      found.negative_scores,
      tracking.find_state(after).v[_LABELS],
      prior=0.62,
      tau1=0.03,
      positive_where=found.positive_where,
      negative_where=found.negative_where,
      reduce_fn=None,
    )
    valid = np.any(found.positive_where, axis=-1) & np.any(found.negative_where, axis=-1)
    risks = np.asarray(risks)[valid]
    np.testing.assert_allclose(outputs.metrics["saturated_lists"], np.mean(risks > 0.95), rtol=1e-6)
    self.assertTrue(
      np.any((risks > 0.8) & (risks < 0.95)) and np.any(risks > 0.95), risks
    )  # the limit makes a difference


class OtherObjectivesTest(chex.TestCase):
  def test_triplet(self):
    config = _loss_config(triplet__margin=0.3)
    objective = objectives.make_objective("triplet", config, _setting())
    where = np.array([1, 1, 1, 1, 1, 0], bool)
    inputs, _ = _inputs(objective, where=where)
    want = losses.triplet_loss(_embeddings(0), _LABELS, margin=0.3, where=where)
    np.testing.assert_allclose(objective.compute(inputs).loss, want, rtol=1e-6)

  @parameterized.parameters(*objectives.LOSSES)
  def test_every_loss_gives_a_finite_scalar_and_gradient(self, name):
    objective = objectives.make_objective(name, _loss_config(), _setting())
    inputs, _ = _inputs(objective)

    def loss(embeddings):
      return objective.compute(inputs._replace(embeddings=embeddings)).loss

    value, grad = jax.jit(jax.value_and_grad(loss))(inputs.embeddings)
    self.assertEqual(value.shape, ())
    self.assertEqual(value.dtype, jnp.float32)
    chex.assert_tree_all_finite((value, grad))
    self.assertTrue(np.any(np.asarray(grad) != 0))

  def test_unknown_name_lists_the_losses(self):
    with self.assertRaisesRegex(ValueError, "soprc"):
      objectives.make_objective("softmax", _loss_config(), _setting())


def test_f53_an_objective_made_under_jit_outlives_it():
  made = []

  @jax.jit
  def make(x):
    made.append(
      objectives.make_objective(
        "soprc", _loss_config(prior__kind="frequency", initial_v="uniform"), _setting()
      )
    )
    return x

  make(1.0)
  inputs, _ = _inputs(made[0])
  assert np.isfinite(made[0].compute(inputs).loss)


@pytest.mark.parametrize(
  ("params", "message"),
  [("jnp.zeros(3)", None), ("jnp.zeros(2)", "add got incompatible"), ("jnp.arange(3)", "int32")],
)
def test_parameters_of_a_custom_loss_are_tried_before_training(
  params, message, tmp_path, monkeypatch
):
  (tmp_path / "with_params.py").write_text(
    "import jax.numpy as jnp, optax\n"
    "from soprc_jax.training.loss_protocol import Objective, Outputs\n"
    "def make(config, setting):\n"
    "  def compute(inputs):\n"
    "    moved = jnp.sum(inputs.params + jnp.ones(3))\n"
    "    return Outputs(jnp.sum(inputs.embeddings) + moved, {}, {})\n"
    f"  return Objective(optax.identity(), compute, init_params=lambda key: {params})\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "with_params", raising=False)
  config = _loss_config(name="with_params:make")
  if message is None:
    objectives.check("with_params:make", config)
  else:
    with pytest.raises(ValueError, match=f"does not work as a loss .*{message}"):
      objectives.check("with_params:make", config)
