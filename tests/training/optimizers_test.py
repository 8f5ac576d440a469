"""Tests schedules as functions of the step, and optimizers against plain numpy loops."""

import math

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax.training import config as config_lib
from soprc_jax.training import loss_protocol, optimizers


def _config(**values):
  config = config_lib.default_config()
  config.update_from_flattened_dict(
    {key.replace("__", "."): value for key, value in values.items()}
  )
  return config_lib.resolve(config)


def _rates(config, steps):
  schedule = optimizers.make_schedule(config)
  return np.array([float(schedule(step)) for step in steps])


class ScheduleTest(chex.TestCase):
  def test_constant(self):
    config = _config(optim__schedule="constant", optim__learning_rate=0.3)
    np.testing.assert_allclose(_rates(config, [0, 7, 10**6]), 0.3, rtol=1e-6)

  def test_cosine(self):
    config = _config(optim__schedule="cosine", optim__learning_rate=0.3, train__steps=10)
    want = [0.15 * (1 + math.cos(math.pi * step / 10)) for step in range(11)]
    np.testing.assert_allclose(_rates(config, range(11)), want, rtol=1e-5, atol=1e-8)

  def test_step(self):
    # As in torch's MultiStepLR: the update after `milestone` updates is the first one with the
    # lower learning rate.
    config = _config(
      optim__schedule="step",
      optim__learning_rate=0.3,
      optim__milestones=(3, 5),
      optim__decay_factor=0.1,
      train__steps=10,
    )
    want = [0.3, 0.3, 0.3, 0.03, 0.03, 0.003, 0.003]
    np.testing.assert_allclose(_rates(config, range(7)), want, rtol=1e-5)

  def test_ramp(self):
    config = _config(optim__schedule="constant", optim__learning_rate=0.4, optim__ramp_steps=4)
    np.testing.assert_allclose(_rates(config, range(6)), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-6)

  @parameterized.parameters("constant", "cosine", "step")
  def test_main_phase_starts_from_its_beginning_after_the_warmup(self, schedule):
    settings = {
      "optim__schedule": schedule,
      "optim__milestones": (2, 4),
      "train__steps": 8,
      "optim__ramp_steps": 2,
    }
    alone = _rates(_config(**settings), range(8))
    config = _config(**settings, warmup__steps=3, warmup__learning_rate=0.007)
    np.testing.assert_allclose(_rates(config, range(11)), [*[0.007] * 3, *alone], rtol=1e-6)

  @parameterized.parameters("constant", "cosine", "step")
  def test_is_a_pure_function_of_the_step(self, name):
    config = _config(
      optim__schedule=name,
      optim__milestones=(2, 4),
      train__steps=8,
      optim__ramp_steps=2,
      warmup__steps=3,
    )
    schedule = optimizers.make_schedule(config)
    want = _rates(config, range(11))
    backwards = [float(schedule(step)) for step in reversed(range(11))]
    np.testing.assert_array_equal(backwards[::-1], want)
    compiled = jax.jit(schedule)
    np.testing.assert_allclose([compiled(jnp.int32(step)) for step in range(11)], want, rtol=1e-6)

  def test_unknown_name(self):
    config = _config()
    config.optim.schedule = "linear"
    with self.assertRaisesRegex(ValueError, "cosine"):
      optimizers.make_schedule(config)


def _params():
  rng = np.random.default_rng(0)
  return {
    "backbone": {"kernel": rng.standard_normal((3, 2)).astype(np.float32)},
    "head": {
      "kernel": rng.standard_normal((2, 4)).astype(np.float32),
      "bias": np.ones(4, np.float32),
    },
  }


def _gradients(steps):
  rng = np.random.default_rng(1)
  return [
    jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), _params())
    for _ in range(steps)
  ]


def _run(config, steps):
  """Returns the parameters after each step with the given gradients."""
  tx = optimizers.make_optimizer(config)
  update = jax.jit(tx.update)
  params = _params()
  state, history = tx.init(params), []
  for gradient in _gradients(steps):
    updates, state = update(gradient, state, params)
    params = jax.tree.map(np.add, params, updates)
    history.append(params)
  return history


class OptimizerTest(chex.TestCase):
  def test_sgd_with_momentum_and_weight_decay_is_torchs(self):
    config = _config(
      optim__name="sgd",
      optim__learning_rate=0.2,
      optim__schedule="step",
      optim__milestones=(3, 4),
      optim__momentum=0.9,
      optim__weight_decay=0.05,
      train__steps=6,
    )
    params = _params()
    buffers = jax.tree.map(np.zeros_like, params)
    for rate, gradient, got in zip(
      [0.2, 0.2, 0.2, 0.02, 0.002, 0.002], _gradients(6), _run(config, 6), strict=True
    ):
      # The decay is part of the gradient (L2), and a lower learning rate scales the whole buffer.
      buffers = jax.tree.map(lambda b, g, p: 0.9 * b + g + 0.05 * p, buffers, gradient, params)
      params = jax.tree.map(lambda p, b, rate=rate: p - rate * b, params, buffers)
      chex.assert_trees_all_close(got, params, rtol=1e-5, atol=1e-6)

  def test_adam_with_weight_decay_is_torchs(self):
    config = _config(
      optim__name="adam",
      optim__learning_rate=0.1,
      optim__schedule="constant",
      optim__weight_decay=0.05,
      train__steps=4,
    )
    params = _params()
    first = second = jax.tree.map(np.zeros_like, params)
    for t, (gradient, got) in enumerate(zip(_gradients(4), _run(config, 4), strict=True), start=1):
      total = jax.tree.map(lambda g, p: g + 0.05 * p, gradient, params)
      first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, total)
      second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, total)
      params = jax.tree.map(
        lambda p, m, v, t=t: p - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8),
        params,
        first,
        second,
      )
      chex.assert_trees_all_close(got, params, rtol=1e-4, atol=1e-5)

  @parameterized.parameters("sgd", "adam")
  def test_head_multiplier_scales_the_rate_of_the_head_only(self, name):
    # One step: after it the decay would apply to other weights.
    start = _params()
    (plain,) = _run(_config(optim__name=name), 1)
    (scaled,) = _run(_config(optim__name=name, optim__head_multiplier=10.0), 1)
    np.testing.assert_array_equal(scaled["backbone"]["kernel"], plain["backbone"]["kernel"])
    for part in ("kernel", "bias"):
      want = 10 * (plain["head"][part] - start["head"][part])
      np.testing.assert_allclose(
        scaled["head"][part] - start["head"][part], want, rtol=1e-3, atol=1e-6
      )

  @parameterized.parameters("sgd", "adam")
  def test_factors_scale_the_updates_of_their_parameters_exactly(self, name):
    config = _config(optim__name=name, optim__head_multiplier=3.0, optim__weight_decay=0.05)
    factors = {"backbone/kernel": 0.25, "head/kernel": 0.5, "head/bias": 1.0}  # powers of two
    params = _params()
    plain, scaled = optimizers.make_optimizer(config), optimizers.make_optimizer(config, factors)
    state, other = plain.init(params), scaled.init(params)
    for gradient in _gradients(5):  # at the same parameters, since the decay depends on them
      want, state = plain.update(gradient, state, params)
      found, other = scaled.update(gradient, other, params)
      for path, factor in factors.items():
        group, leaf = path.split("/")
        np.testing.assert_array_equal(found[group][leaf], factor * want[group][leaf])

  def test_warmup_has_a_rate_of_its_own(self):
    config = _config(
      optim__learning_rate=0.2,
      optim__schedule="constant",
      optim__momentum=0.0,
      optim__weight_decay=0.0,
      warmup__steps=2,
      warmup__learning_rate=0.01,
    )
    params = _params()
    for rate, gradient, got in zip(
      [0.01, 0.01, 0.2, 0.2], _gradients(4), _run(config, 4), strict=True
    ):
      params = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, gradient)
      chex.assert_trees_all_close(got, params, rtol=1e-5, atol=1e-6)

  def test_unknown_name(self):
    config = _config()
    config.optim.name = "lion"
    with self.assertRaisesRegex(ValueError, "adam"):
      optimizers.make_optimizer(config)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
@pytest.mark.parametrize("schedule", optimizers.SCHEDULES)
def test_f58_under_strict_promotion(name, schedule):
  config = _config(
    optim__name=name,
    optim__schedule=schedule,
    optim__milestones=(2,),
    optim__ramp_steps=2,
    warmup__steps=1,
  )
  want = _run(config, 4)
  with jax.numpy_dtype_promotion("strict"):
    found = _run(config, 4)
    rates = [optimizers.make_schedule(config)(jnp.int32(step)) for step in range(4)]
  chex.assert_trees_all_equal(found, want)
  np.testing.assert_allclose(np.array(rates, np.float64), _rates(config, range(4)), rtol=1e-6)


def test_proxies_have_their_multiplier_and_no_parameter_of_the_loss_decays():
  params = {"head": np.ones(3, np.float32)}
  loss_params = {"proxies": np.ones((2, 3), np.float32), "bias": np.float32(1.0)}
  trained = loss_protocol.with_loss_params(params, loss_params)
  values = {"optim__name": "sgd", "optim__learning_rate": 0.1, "optim__schedule": "constant"}
  config = _config(**values, optim__weight_decay=0.5, loss__proxy_multiplier=100.0)
  tx = optimizers.make_optimizer(config)
  updates, _ = tx.update(jax.tree.map(np.ones_like, trained), tx.init(trained), trained)
  want = {"head": np.full(3, -0.15), "loss": {"proxies": np.full((2, 3), -10.0), "bias": -0.1}}
  chex.assert_trees_all_close(updates, want, rtol=1e-6)
  # A state without parameters of the loss is the one of a run of any other loss.
  other = optimizers.make_optimizer(_config(**values, optim__weight_decay=0.5))
  assert jax.tree.structure(tx.init(params)) == jax.tree.structure(other.init(params))
