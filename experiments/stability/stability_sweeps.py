"""Plans the trainings of the stability study and measures those that are missing.

Also estimates how long they take.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import functools
import json
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np

from experiments.stability import stability, stability_training
from soprc_jax._internal import stored
from soprc_jax.training import workdir

CONSTANT, THEOREM = "constant rate", "Theorem 2"
CONDITIONS = (CONSTANT, THEOREM)
# The gradient through T is not a separate method. It is measured where Theorem 2 applies to it.
_THROUGH_T = "SOPRC, gradient through T"
# Compared with the AP loss, only v and the prior differ.
SELF_WEIGHT = "SOPRC, self weight 1/n+"

_STEPS = (16, 32, 64, 128, 256)
EARLY = ("N+ (T = 16)", "N- (T = 16)")
_BASE = {
  CONSTANT: stability.Setting(steps=_STEPS, rate=0.05, beta=0.1),
  # beta = 1 / n+, eta_t = 3 / t, and T up to N+ = 256.
  THEOREM: stability.Setting(steps=_STEPS, rate=3.0, beta=0.25, decays=True),
}
_FIELDS = {
  "n+": "batch_positives",
  "n-": "batch_negatives",
  "N+": "num_positives",
  "N+ (T = 16)": "num_positives",
  "N-": "num_negatives",
  "N- (T = 16)": "num_negatives",
  "T = N+": "num_positives",
  "beta": "beta",
  "rate": "rate",
}
_BATCHES = {
  "n+": (2, 4, 8, 16, 32),
  "n-": (9, 18, 36, 72, 144),
  "N-": (576, 1152, 2304, 4608, 9216),
}
# Dense where epsilon rises fast: SOPRC's epsilon- rises eightfold from eta = 0.035 to 0.05. It must
# not change by more than `stability_slopes.LARGEST_STEP` where algorithms are compared.
_CONSTANT_RATES = (
  *(0.0125, 0.018, 0.021, 0.025, 0.03, 0.035, 0.0385, 0.042, 0.044, 0.046),
  *(0.05, 0.055, 0.06, 0.065, 0.07, 0.078, 0.085, 0.1),
)
_THEOREM_RATES = (0.75, 1.0, 1.25, 1.5, 1.8, 2.1, 2.5, 3.0, 3.5, 4.2, 6.0)
_VALUES: dict[str, dict[str, tuple[float, ...]]] = {
  CONSTANT: {
    "T": _STEPS,
    **_BATCHES,
    "N+": (64, 128, 256, 512, 1024),
    "beta": (0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    "rate": _CONSTANT_RATES,
  },
  # N+ is always at least T; beta follows n+. Up to T = 16 an example is nearly always drawn at most
  # once.
  THEOREM: {
    "T": _STEPS,
    **_BATCHES,
    "N+": (256, 512, 1024, 2048),
    "N+ (T = 16)": (256, 512, 1024, 2048),
    "N- (T = 16)": _BATCHES["N-"],
    "T = N+": (32, 64, 128, 256),
    "rate": _THEOREM_RATES,
  },
}
QUANTITIES = ("T", "n+", "n-", "N+", "N+ (T = 16)", "N-", "N- (T = 16)", "T = N+", "beta", "rate")


_WORKERS = 2


class Point(NamedTuple):
  """One point of a sweep.

  Attributes:
    value: value of the quantity.
    setting: the setting that is measured.
    at: index in its ``steps``.
  """

  value: float
  setting: stability.Setting
  at: int


class Sweep(NamedTuple):
  """Settings that differ in one quantity.

  Attributes:
    conditions: one of `CONDITIONS`.
    quantity: one of `QUANTITIES`; "rate" is eta, or C of eta_t = C / t.
    algorithm: one of `stability.ALGORITHMS`.
    points: by value, ascending.
  """

  conditions: str
  quantity: str
  algorithm: str
  points: tuple[Point, ...]


def plan(algorithms: Sequence[str], quantities: Sequence[str]) -> list[Sweep]:
  """Returns all sweeps of these algorithms in these quantities.

  Args:
    algorithms: of `stability.ALGORITHMS`.
    quantities: of `QUANTITIES`.

  Raises:
    ValueError: a name is unknown, or there is no name.
  """
  for kind, given, known in (
    ("algorithms", algorithms, stability.ALGORITHMS),
    ("sweeps", quantities, QUANTITIES),
  ):
    wrong = [name for name in given if name not in known]
    if wrong or not given:
      raise ValueError(
        f"{kind} must be some of {'; '.join(known)}; got {'; '.join(wrong) or 'none'}"
      )
  return [
    Sweep(conditions, quantity, algorithm, _points(conditions, quantity, algorithm))
    for conditions in CONDITIONS
    for quantity in QUANTITIES
    for algorithm in stability.ALGORITHMS
    if algorithm in algorithms
    and quantity in quantities
    and _is_measured(conditions, quantity, algorithm)
  ]


def _is_measured(conditions: str, quantity: str, algorithm: str) -> bool:
  if quantity not in _VALUES[conditions]:
    return False
  if algorithm == SELF_WEIGHT:
    return quantity in ("T", "rate")
  if algorithm == _THROUGH_T:
    return quantity == "T" or (conditions == THEOREM and quantity in ("n+", "N+"))
  return algorithm == "SOPRC" or quantity not in ("beta", "T = N+")


def _points(conditions: str, quantity: str, algorithm: str) -> tuple[Point, ...]:
  base, values = _BASE[conditions]._replace(algorithm=algorithm), _VALUES[conditions][quantity]
  if quantity == "T":
    return tuple(Point(value, base, i) for i, value in enumerate(values))
  return tuple(_point(base, quantity, value) for value in values)


def _point(base: stability.Setting, quantity: str, value: float) -> Point:
  """Returns the point of a value; it is the base itself if the base has the value.

  Otherwise only its last T is measured, except in sweeps that compare values of T.
  """
  changed: dict[str, Any] = {_FIELDS[quantity]: value}
  setting, last = base._replace(**changed), base.steps[-1]
  if quantity == "T = N+":
    last = int(value)
  if setting != base and quantity != "rate":
    setting = setting._replace(
      steps=(_STEPS[0], last) if quantity[:2] in ("N+", "N-") and base.decays else (last,)
    )
  if quantity == "n+" and base.decays:
    setting = setting._replace(beta=1 / value)
  return Point(value, setting, setting.steps.index(_STEPS[0] if quantity in EARLY else last))


def settings_of(sweeps: Sequence[Sweep]) -> list[stability.Setting]:
  """Returns every setting once, sorted so that those with the same compilation are adjacent."""
  settings = dict.fromkeys(point.setting for sweep in sweeps for point in sweep.points)
  return sorted(
    settings, key=lambda setting: (stability.ALGORITHMS.index(setting.algorithm), _shape(setting))
  )


def _shape(setting: stability.Setting) -> tuple[int, ...]:
  return (setting.steps[-1], setting.batch_positives, setting.batch_negatives)


def name(setting: stability.Setting) -> str:
  """Returns one line that distinguishes a setting from all others.

  >>> name(stability.Setting())
  'SOPRC: N+ 256, N- 2304, n+ 4, n- 36, T 256, beta 0.1, eta 0.05'
  """
  rate = f"eta {setting.rate:g}" + (" / t" if setting.decays else "")
  return (
    f"{setting.algorithm}: N+ {setting.num_positives}, N- {setting.num_negatives}, n+ "
    f"{setting.batch_positives}, n- {setting.batch_negatives}, T "
    f"{' '.join(map(str, setting.steps))}, beta {setting.beta:g}, {rate}"
  )


class Effort(NamedTuple):
  """How much is measured of each setting.

  Attributes:
    repetitions: R, a multiple of 4.
    replaced: K, the number of replaced positives, and of replaced negatives, in each repetition.
    seed: seed of all draws.
  """

  repetitions: int = 128
  replaced: int = 8
  seed: int = 0


def expected_seconds(settings: Sequence[stability.Setting], effort: Effort) -> list[float]:
  """Estimates the seconds of each setting on one core of an AMD EPYC.

  The compilation is included where a shape is new.
  """
  seen: set[Any] = set()
  found = []
  for setting in settings:
    n, m = setting.batch_positives, setting.batch_negatives
    copies = effort.repetitions * (1 + 2 * effort.replaced)
    training = (
      copies
      * setting.steps[-1]
      * (3.2 + 0.012 * (n + m) + 0.0043 * n * (m + stability_training.POINTS))
      * 1e-6
    )
    pairs = setting.num_positives * (setting.num_positives + setting.num_negatives)
    testing = (
      effort.repetitions * stability_training.BLOCK * (len(setting.steps) + 1) * pairs * 1.2e-9
    )
    new = {
      (setting.algorithm, _shape(setting)),
      (setting.num_positives, setting.num_negatives),
    } - seen
    seen |= new
    found.append(
      training + testing + sum(4.5 if isinstance(shape[0], str) else 0.7 for shape in new)
    )
  return found


def run(
  path: Path, settings: Sequence[stability.Setting], effort: Effort, *, told: Callable[[str], None]
) -> dict[str, stability.Measured]:
  """Measures the settings that ``path`` lacks, and writes each one as soon as it is measured.

  Args:
    path: JSON file, new or of the same effort and model.
    settings: the settings to return.
    effort: how much is measured of each.
    told: receives a line about the plan and about each setting.

  Returns:
    `name` of each setting -> its measurements.

  Raises:
    ValueError: the file is corrupt, or of another effort or model (the message says what differs).
      A setting or the effort is out of range.
  """
  for setting in settings:
    stability.check(setting, effort.repetitions, effort.replaced)
  about = {**effort._asdict(), "model": _model()}
  content = _read(path, about)
  # Existing measurements are checked before anything is measured.
  list(
    _measured(
      path,
      content,
      [setting for setting in settings if name(setting) in content["measured"]],
      effort,
    )
  )
  missing = [setting for setting in settings if name(setting) not in content["measured"]]
  expected = expected_seconds(missing, effort)
  told(
    f"{len(settings)} settings, {len(settings) - len(missing)} of them measured before; about "
    f"{sum(expected) / _WORKERS / 60:.1f} minutes on {_WORKERS} idle cores"
  )
  began = time.perf_counter()
  path.parent.mkdir(parents=True, exist_ok=True)
  # Two at a time, since one hardly uses a second core.
  with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
    found = pool.map(functools.partial(stability.measure, **effort._asdict()), missing)
    try:
      for i, (setting, measured) in enumerate(zip(missing, found, strict=True)):
        content["measured"][name(setting)] = {
          key: _rounded(values) for key, values in measured._asdict().items()
        }
        workdir.write_atomically(path, json.dumps(content) + "\n")
        pace = (time.perf_counter() - began) / sum(expected[: i + 1])
        told(_progress(i + 1, len(missing), setting, measured, pace * sum(expected[i + 1 :])))
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  return {
    name(setting): found
    for setting, found in zip(settings, _measured(path, content, settings, effort), strict=True)
  }


def _measured(
  path: Path, content: Mapping[str, Any], settings: Sequence[stability.Setting], effort: Effort
) -> Iterator[stability.Measured]:
  """Yields the measurements of each setting from the content of the file.

  Raises:
    ValueError: the file has another number of values than were measured.
  """
  runs, blocks = effort.repetitions, effort.repetitions // stability_training.BLOCK
  for setting in settings:
    times = len(setting.steps)
    shapes = (
      (times, runs),
      (times, runs),
      (times, blocks),
      (times, blocks),
      (times, runs),
      (runs,),
      (runs,),
      (runs,),
    )
    values = content["measured"][name(setting)]
    arrays = []
    for key, shape in zip(stability.Measured._fields, shapes, strict=True):
      try:
        arrays.append(np.array(values[key], np.float64))
        fits = arrays[-1].shape == shape
      except (TypeError, ValueError):
        fits = False
      if not fits:
        raise ValueError(
          f"{path} is corrupt ({key} of {name(setting)!r} is not {list(shape)} numbers): "
          f"{stored.REMEDY}"
        )
    yield stability.Measured(*arrays)


def _progress(
  done: int,
  count: int,
  setting: stability.Setting,
  measured: stability.Measured,
  seconds_left: float,
) -> str:
  found = (measured.epsilon_positive, measured.epsilon_negative, measured.gap)
  means = ", ".join(
    f"{label} {values[-1].mean():.4f}"
    for label, values in zip(("eps+", "eps-", "gap"), found, strict=True)
  )
  return f"{done}/{count} {name(setting)}: {means}; {seconds_left / 60:.1f} minutes left"


def _rounded(values: np.ndarray) -> Any:
  return np.vectorize(lambda value: float(f"{value:.6g}"), otypes=[float])(values).tolist()


def _model() -> dict[str, Any]:
  """Returns the constants that are not in a setting but change the numbers."""
  return {
    "features": stability_training.FEATURES,
    "hidden": stability_training.HIDDEN,
    "points": stability_training.POINTS,
    "shift": stability.SHIFT,
    **stability_training.LOSS,
  }


def _read(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
  if not path.exists():
    return {"about": dict(about), "measured": {}}
  content = stored.read_json(
    path, {"about": dict, "measured": {str: dict.fromkeys(stability.Measured._fields, list)}}
  )
  there = content["about"]
  differences = [
    f"{key} is {there.get(key)!r} there, {about[key]!r} here"
    for key in about
    if there.get(key) != about[key]
  ]
  if differences:
    raise ValueError(
      f"{path} has results of other settings ({'; '.join(differences)}): choose another --workdir, "
      "or the same flags"
    )
  return content
