"""History of v and its true value for some training classes: ``v.jsonl``, a line per evaluation.

A line is ``{"step": 200, "classes": [{"class": name, "row": its row of v, "weight": its weight,
"visits": number of steps of the main phase whose batch had a pair of the class, "last_visit": the
latest of these steps (0: none), "v": [M], "true": [M]}, ...]}``. ``true`` is the v that would be
computed from scratch from all images of the class by the model of that step. Where an image has
several labels, a class is a pattern, and its pairs are those with any relevant image.
"""

import functools
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
import numpy as np

from soprc_jax import interpolation, tracking
from soprc_jax.data import sampler, sources
from soprc_jax.data.label_sets import LabelSets
from soprc_jax.training import build, evaluation, parallel
from soprc_jax.training import workdir as workdir_lib

FILE = "v.jsonl"
# A class of thousands of images would slow every evaluation; this many estimate its scores closely
# enough.
_MAX_IMAGES = 200


class VHistory:
  """Writes ``v.jsonl`` of a run; does nothing for losses without v.

  Args:
    workdir: folder of the run.
    config: resolved; ``config.log.v_classes`` classes are recorded, evenly spaced in the order of
      their rows.
    data: data of the run.
    last_step: step of the checkpoint that the run resumes from. Later lines are dropped, since
      those steps are repeated.
    visits: `visits` at that step; None: no visits.
    writes: whether this process writes the file.
  """

  def __init__(
    self,
    workdir: Path,
    config: ConfigDict,
    data: build.Data,
    *,
    last_step: int,
    visits: list[list[int]] | None = None,
    writes: bool = True,
  ):
    self._config, self._train, self._rows = config, data.splits["train"], data.rows
    follows = config.loss.name == "soprc" and config.loss.v == "carried"
    self._sets = sources.label_sets(self._train)
    self._classes = choose(self._train.labels, config.log.v_classes, self._sets) if follows else []
    found = np.zeros((2, len(self._classes)), int) if visits is None else np.array(visits, int)
    # A resumed run may record other classes (log.v_classes).
    fits = found.shape == (2, len(self._classes))
    self._visits = found if fits else np.zeros((2, len(self._classes)), int)
    self._images = {label: images(self._train.labels, label) for label in self._classes}
    self._relevant = {label: self._candidates(label) for label in self._classes}
    self._log: workdir_lib.JsonLines | None = None
    if self._classes:
      path = workdir / FILE
      lines = [line for line in workdir_lib.read_lines(path) if line["step"] <= last_step]
      self._log = workdir_lib.JsonLines(path, lines, writes=writes)

  def count(self, step: int, plan_of: sampler.ClassSampler) -> None:
    """Counts the recorded classes that have a pair in the batch of a step of the main phase."""
    if self._classes:
      plan = plan_of(step - 1)
      labels = self._train.labels[plan.positions[plan.where]]
      there, counts = np.unique(labels, return_counts=True)
      if self._sets is not None:
        counts = self._sets.count(there, labels)
      held = np.isin(self._classes, there[counts > 1])
      self._visits[0] += held
      self._visits[1][held] = step

  @property
  def visits(self) -> list[list[int]]:
    """Visits of each recorded class, and the step of the last one, for the checkpoint."""
    return [[int(value) for value in row] for row in self._visits]

  def measure(
    self, step: int, embed: evaluation.EmbedFn, variables: Any, opt_state: Any
  ) -> dict[str, Any] | None:
    """Returns the line of a step, None if no class is recorded.

    Args:
      step: >= 1.
      embed: function of `evaluation.make_embed`.
      variables: variables of the model, on all devices.
      opt_state: optimizer state with the state of the tracker, on all devices.
    """
    if self._log is None:
      return None
    state = parallel.unreplicate(tracking.find_state(opt_state))
    parts = [np.union1d(self._images[label], self._relevant[label]) for label in self._classes]
    positions = np.concatenate(parts)
    embedded = embed(variables, sources.Subset(self._train, positions))
    ends = np.searchsorted(embedded.positions, np.cumsum([0, *map(len, parts)]))
    found = []
    for place, label in enumerate(self._classes):
      own = slice(ends[place], ends[place + 1])
      at = positions[embedded.positions[own]]
      found.append(self._class(label, place, state, embedded.embeddings[own], at))
    return {"step": step, "classes": found}

  def write(self, line: dict[str, Any] | None) -> None:
    """Appends a line of `measure`."""
    if self._log is not None and line is not None:
      self._log.write(line)

  def sync(self) -> None:
    """Writes all lines to disk."""
    if self._log is not None:
      self._log.sync()

  def close(self) -> None:
    if self._log is not None:
      self._log.close()

  def _candidates(self, label: int) -> np.ndarray:
    """Returns the positions of images that are relevant to a class, up to 200, evenly spaced."""
    if self._sets is None:
      return self._images[label]
    found = self._sets.relevant(np.array([label]), self._train.labels)[0]
    return _spread(np.flatnonzero(found))

  def _class(
    self,
    label: int,
    place: int,
    state: tracking.ScoreEmaState,
    embeddings: np.ndarray,
    positions: np.ndarray,
  ) -> dict[str, Any]:
    row = self._rows[label]
    return {
      "class": self._train[int(self._images[label][0])].shown_class,
      "row": row,
      "weight": round(float(state.weight[row]), 6),
      "visits": int(self._visits[0][place]),
      "last_visit": int(self._visits[1][place]),
      "v": _rounded(state.v[row]),
      "true": _rounded(
        true_scores(
          embeddings,
          self._config.loss.num_points,
          self._config.loss.grid,
          queries=np.isin(positions, self._images[label]),
          candidates=np.isin(positions, self._relevant[label]),
        )
      ),
    }


def choose(labels: np.ndarray, count: int, sets: LabelSets | None = None) -> list[int]:
  """Returns the labels of up to ``count`` classes that have a pair, evenly spaced and ascending.

  With ``sets`` the labels are patterns, and a pair may be of two of them.

  >>> choose(np.array([3, 3, 5, 7, 7, 8, 8, 9, 9]), 2)
  [3, 9]
  """
  found, sizes = np.unique(labels, return_counts=True)
  if sets is not None:
    sizes = sets.count(found, labels)
  paired = found[sizes > 1]
  places = np.linspace(0, len(paired) - 1, min(count, len(paired)))
  return [int(label) for label in paired[np.round(places).astype(int)]]


def images(labels: np.ndarray, label: int) -> np.ndarray:
  """Returns the positions of a class's images, ascending; of a large class 200, evenly spaced."""
  return _spread(np.flatnonzero(labels == label))


def _spread(found: np.ndarray) -> np.ndarray:
  """Returns up to 200 of some positions, evenly spaced."""
  return found[np.linspace(0, len(found) - 1, min(len(found), _MAX_IMAGES)).astype(int)]


def true_scores(
  embeddings: np.ndarray,
  num_points: int,
  grid: interpolation.Grid = "midpoints",
  *,
  queries: np.ndarray | None = None,
  candidates: np.ndarray | None = None,
) -> np.ndarray:
  """Computes the v that all images of a class give, ``[M]``.

  It is the mean over the images of phi of their similarities to all other images of the class.

  Args:
    embeddings: ``[n, D]`` unit norm; fewer than two give zeros.
    num_points: M, the length of v.
    grid: see `soprc_jax.interpolate_scores`.
    queries: ``[n]`` bool, the images that are averaged over; None: all.
    candidates: ``[n]`` bool, the images that they are compared with; None: all.

  >>> right_angle = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
  >>> print([f"{value:.3f}" for value in true_scores(right_angle, 2)])
  ['0.200', '0.667']
  """
  count = len(embeddings)
  if count < 2 or (queries is not None and not queries.any()):
    return np.zeros(num_points)
  # Padded, so that the classes of a run share a few compiled shapes.
  size = 1 << (count - 1).bit_length()
  padded = np.zeros((size, embeddings.shape[1]), np.float32)
  padded[:count] = embeddings
  compared = np.zeros(size, bool)
  compared[:count] = True if candidates is None else candidates
  pairs = compared & ~np.eye(size, dtype=bool)
  phi = _phi(padded @ padded.T, pairs, num_points, grid)
  of_queries = np.asarray(phi)[:count]
  return (of_queries if queries is None else of_queries[queries]).mean(axis=0)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _phi(
  scores: jax.Array, where: jax.Array, num_points: int, grid: interpolation.Grid
) -> jax.Array:
  return interpolation.interpolate_scores(
    scores, num_points=num_points, bounds=(-1.0, 1.0), grid=grid, where=where
  )


def _rounded(values: Any) -> list[float]:
  return [round(float(value), 6) for value in values]
