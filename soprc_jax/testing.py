"""Hypothesis strategies for property tests of ranking losses, with inputs that often break them.

They draw edge cases that long runs meet: ties, collapsed and zero embeddings, classes of one image,
lists without a positive, scores beyond any bound. All inputs are finite, valid for the functions of
`soprc_jax`, and numpy arrays. Shapes come from a small set, since jax compiles once for each shape.
Values are not restricted.

This module requires hypothesis, which no other module of the package imports: ``pip install
hypothesis``.

>>> batch = embeddings_and_labels().example()  # doctest: +SKIP
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

try:
  from hypothesis import strategies as st
  from hypothesis.extra import numpy as hnp
except ImportError as error:
  raise ImportError(
    "soprc_jax.testing needs hypothesis to draw examples: pip install hypothesis"
  ) from error

Strategy = st.SearchStrategy

FLOAT_TYPES = (np.float32, np.float64, np.float16, jnp.bfloat16)
# (lists, positives, negatives): a batch, one list, one entry, and each axis empty once.
LIST_SHAPES = ((3, 4, 5), (1, 3, 7), (1, 1, 1), (2, 0, 3), (2, 3, 0), (0, 3, 4))
# (images, width)
BATCH_SHAPES = ((6, 3), (1, 2))
# Ids as in real data sets: not starting at 0, with gaps, up to the ends of int32.
LABELS = (0, 1, 7, -3, 11_318, 2**31 - 1, -(2**31))

_FLOAT32 = np.finfo(np.float32)
# The bounds of a cosine and their rounded neighbors, zeros of both signs, numbers at and below the
# smallest normal one.
_SPECIAL = (
  *(0.0, -0.0, 1.0, -1.0, 0.5, float(np.nextafter(np.float32(1), 2)), -1.0000002384185791),
  *(float(_FLOAT32.tiny), -float(_FLOAT32.tiny), float(_FLOAT32.smallest_subnormal), -1e-40),
)


class ScoreLists(NamedTuple):
  """Holds the scores of Q lists, as the estimators take them.

  Attributes:
    positive_scores: ``[Q, P]``.
    negative_scores: ``[Q, N]``.
    positive_where: ``[Q, P]`` mask of the valid positives.
    negative_where: ``[Q, N]`` mask of the valid negatives.
  """

  positive_scores: np.ndarray
  negative_scores: np.ndarray
  positive_where: np.ndarray
  negative_where: np.ndarray


class Batch(NamedTuple):
  """Holds the images of a batch, as `soprc_jax.retrieval_lists` and the losses take them.

  Attributes:
    embeddings: ``[B, D]``, rows of unit norm or zero.
    labels: ``[B]`` int32.
    where: ``[B]`` mask of the valid images.
  """

  embeddings: np.ndarray
  labels: np.ndarray
  where: np.ndarray


def scores(
  shape: tuple[int, ...] | int = (5,),
  *,
  limit: float = 1e30,
  dtypes: Sequence[npt.DTypeLike] = (np.float32,),
) -> Strategy[np.ndarray]:
  """Draws finite scores, with many edge cases.

  Among them are cosines on a grid (many ties) and between, all equal, the bounds and just beyond,
  subnormals, and numbers up to ``limit``.

  Args:
    shape: shape of the array.
    limit: largest absolute value >= 2, or that of the dtype if it is smaller. Sums of squares stay
      finite only below 1e18.
    dtypes: one of them is drawn. `FLOAT_TYPES` are all that the library promotes or keeps.

  Returns:
    A strategy of numpy arrays.

  Raises:
    ValueError: ``limit`` < 2.

  >>> import hypothesis
  >>> @hypothesis.given(scores((2, 3), limit=10.0))
  ... def check(values):
  ...   assert values.shape == (2, 3) and np.all(np.abs(values) <= 10)
  >>> check()
  """
  if not 2.0 <= limit < math.inf:
    raise ValueError(f"limit must be a finite number, at least 2, got {limit!r}")
  far = min(limit, float(_FLOAT32.max))
  special = [value for value in (*_SPECIAL, far, -far) if abs(value) <= far]
  element = st.one_of(
    st.integers(-256, 256).map(lambda number: number / 256),
    st.floats(-1.0, 1.0, width=32),
    st.sampled_from(special),
    st.floats(-far, far, allow_subnormal=True).map(
      lambda number: math.copysign(min(abs(number), far), number)
    ),
  )
  grid = hnp.arrays(np.int16, shape, elements=st.integers(-256, 256)).map(
    lambda numbers: numbers / 256
  )
  equal = element.map(lambda value: np.full(shape, value))
  anything = hnp.arrays(np.float64, shape, elements=element, fill=st.nothing())
  return st.tuples(st.one_of(grid, anything, equal), st.sampled_from(list(dtypes))).map(
    lambda drawn: _cast(*drawn)
  )


def masks(shape: tuple[int, ...] | int) -> Strategy[np.ndarray]:
  """Draws boolean masks of valid entries: all, none, or any mixture.

  >>> import hypothesis
  >>> @hypothesis.given(masks((2, 3)))
  ... def check(where):
  ...   assert where.shape == (2, 3) and where.dtype == bool
  >>> check()
  """
  return st.one_of(
    hnp.arrays(bool, shape), st.sampled_from([True, False]).map(lambda value: np.full(shape, value))
  )


@st.composite
def score_lists(
  draw: Any,
  shapes: Sequence[tuple[int, int, int]] = LIST_SHAPES,
  *,
  limit: float = 1e30,
  dtypes: Sequence[npt.DTypeLike] = (np.float32,),
) -> ScoreLists:
  """Draws positive and negative scores of some lists with their masks.

  Args:
    draw: passed by hypothesis; not an argument of the strategy.
    shapes: ``(Q, P, N)``, one of them is drawn.
    limit: as in `scores`.
    dtypes: as in `scores`. Both arrays have the drawn dtype.

  Returns:
    A strategy of `ScoreLists`.

  >>> import hypothesis, soprc_jax
  >>> @hypothesis.given(score_lists([(2, 3, 4)]))
  ... def check(lists):
  ...   loss = soprc_jax.ap_loss(*lists[:2], positive_where=lists.positive_where,
  ...     negative_where=lists.negative_where)
  ...   assert 0 <= loss <= 1
  >>> hypothesis.settings(max_examples=3)(check)()
  """
  count, positives, negatives = draw(st.sampled_from(list(shapes)))
  dtype = draw(st.sampled_from(list(dtypes)))
  sides = [(count, positives), (count, negatives)]
  found = [draw(scores(side, limit=limit, dtypes=[dtype])) for side in sides]
  return ScoreLists(*found, *(draw(masks(side)) for side in sides))


def labels(size: int) -> Strategy[np.ndarray]:
  """Draws int32 labels ``[size]``: few classes of unequal size, one class, or one class per image.

  Labels come in any order, and include the ends of int32.

  >>> import hypothesis
  >>> @hypothesis.given(labels(4))
  ... def check(values):
  ...   assert values.shape == (4,) and values.dtype == np.int32
  >>> check()
  """
  few = st.lists(st.sampled_from(LABELS), min_size=size, max_size=size)
  skewed = st.lists(
    st.sampled_from((LABELS[-1], LABELS[-1], LABELS[-2])), min_size=size, max_size=size
  )
  alone = st.permutations(range(size))
  return st.one_of(few, skewed, alone).map(lambda values: np.array(values, np.int32))


@st.composite
def embeddings_and_labels(
  draw: Any,
  shapes: Sequence[tuple[int, int]] = BATCH_SHAPES,
  *,
  dtypes: Sequence[npt.DTypeLike] = (np.float32,),
) -> Batch:
  """Draws unit vectors with labels and a mask.

  The vectors are in general position, exact duplicates, orthogonal (exact ties), or all equal. Some
  rows may be zero.

  Args:
    draw: passed by hypothesis; not an argument of the strategy.
    shapes: ``(B, D)`` with D >= 1, one of them is drawn.
    dtypes: one of them is drawn. In half precision rows have unit norm up to rounding.

  Returns:
    A strategy of `Batch`.

  >>> import hypothesis, soprc_jax
  >>> @hypothesis.given(embeddings_and_labels([(4, 2)]))
  ... def check(batch):
  ...   assert np.isfinite(soprc_jax.losses.triplet_loss(batch.embeddings, batch.labels,
  ...     where=batch.where))
  >>> hypothesis.settings(max_examples=3)(check)()
  """
  size, dim = draw(st.sampled_from(list(shapes)))
  rows = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).standard_normal((size, dim))
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  kind = draw(st.sampled_from(["general", "duplicates", "axes", "equal"]))
  if size and kind != "general":
    if kind == "axes":
      rows = np.eye(dim)[draw(hnp.arrays(np.int64, size, elements=st.integers(0, dim - 1)))]
      rows *= draw(hnp.arrays(np.int64, (size, 1), elements=st.sampled_from([1, -1])))
    else:
      distinct = 1 if kind == "equal" else max(size // 2, 1)
      rows = rows[draw(hnp.arrays(np.int64, size, elements=st.integers(0, distinct - 1)))]
  if draw(st.booleans()):
    rows = rows * draw(masks((size, 1)))
  dtype = draw(st.sampled_from(list(dtypes)))
  return Batch(rows.astype(dtype), draw(labels(size)), draw(masks((size,))))


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
  """Casts the array to ``dtype``, clipped to its largest finite number."""
  largest = float(jnp.finfo(dtype).max)
  return np.clip(array, -largest, largest).astype(dtype)
