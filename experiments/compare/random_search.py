"""Random search with the same effort for every method: as many trials, of as many dimensions.

A method's space has its learning rate, the sampler of its batches, and the hyperparameter of its
loss that matters most. The second half of the trials is drawn from a larger space if the best trial
of the first half lies at an edge.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from soprc_jax.training import methods

RATE = "optim.learning_rate"
SAMPLER = "data.sampler"
_EDGE = 0.1  # share of a range, at each of its ends, that counts as its edge
# Random classes, or groups of this many confusable classes.
LARGEST_GROUP = 8
_SAMPLERS = ("random", 2, 4, LARGEST_GROUP)


class Dimension(NamedTuple):
  """One searched key of the config.

  Attributes:
    key: dotted key. ``data.sampler`` stands for ``data.confusable.group`` too.
    low: lower end of the range of a number, which is drawn on a logarithmic scale.
    high: upper end.
    choices: what is chosen from, for other keys.
    integer: whether the number is an integer.
  """

  key: str
  low: float = 0.0
  high: float = 0.0
  choices: tuple[Any, ...] = ()
  integer: bool = False

  def value(self, position: float) -> Any:
    """Returns the value at a position in [0, 1)."""
    if self.choices:
      return self.choices[int(position * len(self.choices))]
    number = self.low * (self.high / self.low) ** position
    return round(number) if self.integer else float(f"{number:.6g}")

  def edge(self, value: Any) -> str:
    """Returns ``"low"`` or ``"high"`` for a number at that edge of the range, else ""."""
    if self.choices:
      return ""
    position = math.log(value / self.low) / math.log(self.high / self.low)
    return "low" if position < _EDGE else "high" if position > 1 - _EDGE else ""

  def grown(self, value: Any) -> "Dimension":
    """Returns the range with half of its width more, beyond the edge at which a value lies."""
    edge, more = self.edge(value), math.sqrt(self.high / self.low) if self.high else 1.0
    if edge == "low":
      return self._replace(low=self.low / more)
    return self._replace(high=self.high * more) if edge == "high" else self

  def __str__(self) -> str:
    if self.choices:
      return f"{self.key} {', '.join(map(str, self.choices))}"
    return f"{self.key} {self.low:.3g} to {self.high:.3g}"


_KNOBS = {
  "soprc": Dimension("loss.tau1", 0.01, 0.1),
  "ap": Dimension("loss.tau1", 0.01, 0.1),
  "contrastive": Dimension("loss.contrastive.negative_margin", 0.2, 0.8),
  "triplet": Dimension("loss.triplet.margin", 0.03, 0.3),
  "multi_similarity": Dimension("loss.multi_similarity.beta", 10.0, 100.0),
  "xbm": Dimension("loss.xbm.negative_margin", 0.2, 0.8),
  "smooth_ap": Dimension("loss.smooth_ap.tau", 0.003, 0.1),
  "fast_ap": Dimension("loss.fast_ap.num_bins", 5, 50, integer=True),
  "listwise_ap": Dimension("loss.listwise_ap.num_bins", 5, 50, integer=True),
  "auroc": Dimension("loss.auroc.tau", 0.03, 0.3),
  "sup_con": Dimension("loss.sup_con.temperature", 0.02, 0.2),
  "quad_linear_ap": Dimension("loss.quad_linear_ap.width", 0.03, 0.3),
  "sup_ap": Dimension("loss.sup_ap.tau", 0.003, 0.1),
  "recall_at_k": Dimension("loss.recall_at_k.tau2", 0.003, 0.1),
  "sigmoid": Dimension("loss.sigmoid.scale", 5.0, 50.0),
  "proxy_anchor": Dimension("loss.proxy_anchor.alpha", 8.0, 64.0),
  "norm_softmax": Dimension("loss.norm_softmax.temperature", 0.02, 0.2),
  "arc_face": Dimension("loss.arc_face.margin", 0.1, 0.7),
  "blackbox": Dimension("loss.blackbox.lambda_", 1.0, 20.0),
}
Space = tuple[Dimension, ...]


def space(method: str, rates: Sequence[float]) -> Space:
  """Returns the declared search space of a method.

  Args:
    method: key of `methods.METHODS`.
    rates: learning rates; the space ranges from the lowest to the highest.

  Raises:
    ValueError: the method has no declared space, or the range of learning rates is too narrow.
  """
  if method not in methods.METHODS:
    known = ", ".join(methods.METHODS)
    raise ValueError(
      f"--trials needs a search space, and method {method!r} has none in "
      f"experiments/compare/random_search.py: choose from {known}, or leave --trials out"
    )
  if max(rates) < 2 * min(rates):
    raise ValueError(
      "--trials draws learning rates from the lowest to the highest of --rates: give two, the "
      f"higher one at least twice the other; got {', '.join(f'{rate:g}' for rate in rates)}"
    )
  rate = Dimension(RATE, min(rates), max(rates))
  return (rate, Dimension(SAMPLER, choices=_SAMPLERS), _KNOBS[methods.METHODS[method].loss])


def config_values(trial: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config keys of a trial, without its learning rate, with their values."""
  found = {key: value for key, value in trial.items() if key not in (RATE, SAMPLER)}
  if trial[SAMPLER] == "random":
    return found | {SAMPLER: "random"}
  return found | {SAMPLER: "confusable", "data.confusable.group": trial[SAMPLER]}


class Found(NamedTuple):
  """The trials of one method.

  Attributes:
    spaces: the space of each half of the trials.
    trials: key -> value of each trial.
    val: validation mAUPRC of each trial; NaN where training diverged.
  """

  spaces: tuple[Space, ...]
  trials: tuple[dict[str, Any], ...]
  val: tuple[float, ...]

  @property
  def best(self) -> dict[str, Any]:
    """The trial with the highest validation mAUPRC."""
    return self.trials[int(np.argmax(np.nan_to_num(self.val, nan=-1.0)))]

  @property
  def values(self) -> dict[str, Any]:
    """The config keys of the best trial, see `config_values`."""
    return config_values(self.best)

  @property
  def edges(self) -> list[str]:
    """The keys whose best value lies at an edge of the last space."""
    return [one.key for one in self.spaces[-1] if one.edge(self.best[one.key])]

  def expected_best(self) -> dict[int, float]:
    """Returns N -> expected best validation mAUPRC of N random trials.

    The trials are drawn with replacement from those that were made (Dodge et al., 2019). One that
    diverged counts 0. The numbers are 1, 2, 4, ... and that of all trials.
    """
    values, total = np.sort(np.nan_to_num(self.val, nan=0.0)), len(self.val)
    ranks = np.arange(total + 1) / total
    counts = [2**i for i in range(total.bit_length()) if 2**i < total] + [total]
    return {count: float(values @ np.diff(ranks**count)) for count in counts}


def run(
  declared: Space, num_trials: int, seed: int, validate: Callable[[dict[str, Any]], float]
) -> Found:
  """Makes the trials of a method.

  In each half of the trials every dimension is stratified: its range is cut into as many parts as
  there are trials, with one trial in each. All methods have the same positions in their ranges.

  Args:
    declared: space of the first half.
    num_trials: number of trials, at least 2.
    seed: seed of the positions.
    validate: returns the validation mAUPRC of a trial.
  """
  found = Found((), (), ())
  current = declared
  for half, count in enumerate((num_trials - num_trials // 2, num_trials // 2)):
    if half:
      current = tuple(one.grown(found.best[one.key]) for one in current)
    rng = np.random.default_rng([seed, half])
    positions = (
      np.stack([rng.permutation(count) for _ in current], axis=1)
      + rng.random((count, len(current)))
    ) / count
    trials = [
      {one.key: one.value(position) for one, position in zip(current, row)} for row in positions
    ]
    found = Found(
      (*found.spaces, current),
      (*found.trials, *trials),
      (*found.val, *map(validate, trials)),
    )
  return found
