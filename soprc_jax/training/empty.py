"""Batches without a list that counts: their loss is 0, which must not pass for a solved task."""

import logging

_log = logging.getLogger(__name__)

# So many in a row are no accident of the draw: what is drawn from has nothing to rank.
LIMIT = 20


class EmptyBatchesError(ValueError):
  """Batch after batch has no query with both a positive and a negative: nothing is learned."""


class EmptyBatches:
  """Counts the batches in a row of which no list was valid.

  Args:
    limit: number at which the run stops.
  """

  def __init__(self, limit: int = LIMIT):
    self._limit, self._in_a_row = limit, 0

  def note(self, step: int, valid_lists: float) -> None:
    """A step by its metric ``valid_lists``: the first of a row of empty ones is told in a warning.

    Raises:
      EmptyBatchesError: it is the ``limit``-th in a row.
    """
    if valid_lists > 0:
      self._in_a_row = 0
      return
    self._in_a_row += 1
    if self._in_a_row == 1:
      _log.warning(
        "Step %d: no image of the batch has both a positive and a negative, there is nothing to rank and a loss of 0 means nothing.",
        step,
      )
    if self._in_a_row >= self._limit:
      raise EmptyBatchesError(
        f"no image had both a positive and a negative in {self._in_a_row} batches in a row, up to step {step}: there is nothing to rank. "
        "Raise train.per_class, or look at data.small_classes, data.on_broken and the labels"
      )
