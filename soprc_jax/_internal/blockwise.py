"""Maps over blocks of an array, so that no temporary grows with the cube of the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Target size of the largest temporary of a block, in entries: 64 MiB in float32. A block has at
# least one row, or a few columns.
BLOCK_ENTRIES = 2**24
_FEW_COLUMNS = 4
# Entries of a block of columns that fits into the cache: several times as fast as a larger one.
_CACHED_ENTRIES = 2**20


def map_rows(row_fn: Callable[..., Any], rows: Any, entries_per_row: int) -> Any:
  """Applies ``row_fn`` to each row of the arrays, in blocks that keep temporaries small.

  Temporaries stay small in the gradient too.

  Args:
    row_fn: function of one row of each array, passed in order.
    rows: a tuple of arrays, or trees of arrays, with a common leading axis.
    entries_per_row: entries of the largest temporary of one row.
  """
  num_rows = jax.tree.leaves(rows)[0].shape[0]
  block = max(1, min(num_rows, BLOCK_ENTRIES // max(entries_per_row, 1)))
  if block == num_rows:
    return jax.vmap(row_fn)(*rows)
  # Recomputed in the backward pass, since the saved temporaries of all blocks would be as large as
  # the whole tensor.
  return jax.lax.map(jax.checkpoint(lambda row: row_fn(*row)), rows, batch_size=block)


def map_columns(
  column_fn: Callable[[jax.Array], jax.Array], array: jax.Array, entries_per_column: int
) -> jax.Array:
  """Applies ``column_fn`` to ``array [..., P]`` in blocks of columns, like `map_rows`.

  Args:
    column_fn: ``[..., p] -> [..., p]`` for any p. It must treat columns independently.
    array: ``[..., P]``.
    entries_per_column: entries of the largest temporary of one column.
  """
  # The temporary of a few columns is no larger than the scores that they are compared with.
  count = array.shape[-1]
  block = max(1, min(BLOCK_ENTRIES, _CACHED_ENTRIES) // max(entries_per_column, 1))
  if count <= max(block, _FEW_COLUMNS):
    return column_fn(array)
  # Whole blocks, not columns under vmap: with an additional axis XLA's CPU backend is several times
  # as slow.
  missing = -count % block
  padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)], mode="edge")
  blocks = jnp.moveaxis(padded.reshape(*array.shape[:-1], -1, block), -2, 0)
  found = jax.lax.map(jax.checkpoint(column_fn), blocks)
  return jnp.moveaxis(found, 0, -2).reshape(padded.shape)[..., :count]
