"""Parts of an array one after the other, so that no temporary grows with the cube of the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Entries of the largest temporary that a block aims at, 64 MiB in float32; one row, or a few columns, are taken in any case.
BLOCK_ENTRIES = 2**24
_FEW_COLUMNS = 4


def map_rows(row_fn: Callable[..., Any], rows: Any, entries_per_row: int) -> Any:
  """``row_fn`` on each row of the arrays, so many at a time that temporaries stay small, in the gradient too.

  Args:
    row_fn: function of one row of each array, given in order.
    rows: a tuple of arrays, or trees of arrays, with a common leading axis.
    entries_per_row: entries of the largest temporary of one row.
  """
  num_rows = jax.tree.leaves(rows)[0].shape[0]
  block = max(1, min(num_rows, BLOCK_ENTRIES // max(entries_per_row, 1)))
  if block == num_rows:
    return jax.vmap(row_fn)(*rows)
  # Recomputed in the backward pass, since the saved temporaries of all blocks would be the whole tensor again.
  return jax.lax.map(jax.checkpoint(lambda row: row_fn(*row)), rows, batch_size=block)


def map_columns(column_fn: Callable[[jax.Array], jax.Array], array: jax.Array, entries_per_column: int) -> jax.Array:
  """``column_fn``, which treats each column by itself, on ``array [..., P]`` in blocks of columns, as `map_rows`.

  Args:
    column_fn: ``[..., p] -> [..., p]`` for any p.
    array: ``[..., P]``.
    entries_per_column: entries of the largest temporary of one column.
  """
  # A few columns at once cost no more than what is there already: the scores that they are compared with.
  if array.shape[-1] <= _FEW_COLUMNS or array.shape[-1] * entries_per_column <= BLOCK_ENTRIES:
    return column_fn(array)
  columns = jnp.moveaxis(array, -1, 0)[..., None]
  return jnp.moveaxis(map_rows(column_fn, (columns,), entries_per_column)[..., 0], 0, -1)
