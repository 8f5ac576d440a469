"""Checks of arguments. Each error names the argument, its value, and what is allowed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax._internal import masks

# The smallest width: float32 rounds anything less to 0. The largest: beyond it products with a
# width overflow.
_WIDTHS = (float(np.finfo(np.float32).tiny), 1e30)


def check_masks_passed(**scores_and_masks: tuple[Any, Any]) -> None:
  """Raises a ValueError if scores on the host are infinite and come without a mask.

  Args:
    **scores_and_masks: name of the scores -> (scores, mask). Arrays on a device are not checked, to
      avoid waiting for the device. `masked` turns their infinite entries into NaN.
  """
  for name, (scores, where) in scores_and_masks.items():
    if where is not None or isinstance(scores, jax.Array):
      continue
    numbers = np.asarray(scores)
    if numbers.dtype.kind == "f" and np.isinf(numbers).any():
      raise ValueError(
        f"{name} contain {numbers[np.isinf(numbers)].flat[0]} and come without a mask. Invalid "
        "entries of RetrievalLists are infinite: pass **lists.masks"
      )


def check_count(name: str, value: Any, *, low: int = 1) -> None:
  """Raises a ValueError if a size is not an integer, or below ``low``."""
  if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
    raise ValueError(f"{name} must be an integer, at least {low}; got {value!r}")


def check_range(
  name: str, value: Any, *, low: float = -np.inf, high: float = np.inf, open_low: bool = False
) -> None:
  """Raises a ValueError if a host number is not finite, or outside ``[low, high]``.

  With ``open_low`` the range is ``(low, high]``. Traced values are unknown here and pass. Device
  values pass too, to avoid waiting for the device.
  """
  numbers = _host_numbers(name, value)
  if numbers is None:
    return
  below = numbers <= low if open_low else numbers < low
  wrong = below | (numbers > high) | ~np.isfinite(numbers)
  if wrong.any():
    first = numbers[wrong].flat[0]
    opening, closing = "(" if open_low or np.isinf(low) else "[", ")" if np.isinf(high) else "]"
    raise ValueError(f"{name} must lie in {opening}{low:g}, {high:g}{closing}, got {first:g}")


def check_width(name: str, value: Any) -> None:
  """Raises a ValueError if a host number is not a width > 0 in float32.

  float32 would round a smaller number to 0, which gives 0/0.
  """
  check_range(name, value, low=0.0, open_low=True)
  numbers = _host_numbers(name, value)
  if numbers is None:
    return
  wrong = (numbers < _WIDTHS[0]) | (numbers > _WIDTHS[1])
  if wrong.any():
    first = numbers[wrong].flat[0]
    raise ValueError(
      f"{name} must lie in [{_WIDTHS[0]:.3g}, {_WIDTHS[1]:g}], the range that float32 computes "
      f"with, got {first:g}"
    )


def _host_numbers(name: str, value: Any) -> np.ndarray | None:
  """Converts a plain value to numbers; returns None for traced and device values."""
  if value is None or isinstance(value, jax.Array):
    return None
  try:
    if np.asarray(value).dtype.kind not in "US":  # numpy would read a number from a text
      return np.asarray(value, np.float64)
  except (TypeError, ValueError):
    pass
  except OverflowError as error:  # its digits may be thousands
    raise ValueError(f"{name} has an integer that is too large for a float") from error
  raise TypeError(f"{name} must be a number or an array, got {value!r}")


def check_lists(**lists: jax.Array) -> None:
  """Raises an AssertionError, like chex, unless all are ``[..., list]`` with equal leading axes."""
  shapes = {name: array.shape for name, array in lists.items()}
  if (
    any(len(shape) < 1 for shape in shapes.values())
    or len({shape[:-1] for shape in shapes.values()}) > 1
  ):
    told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise AssertionError(f"these must have a list axis after the same leading axes: {told}")


def per_list(name: str, value: Any, scores: jax.Array) -> jax.Array:
  """Broadcasts a number or an array to ``[..., 1]``, one value per list, in the scores' dtype."""
  array, leading = jnp.asarray(value, scores.dtype), scores.shape[:-1]
  try:
    return jnp.broadcast_to(array, leading)[..., None]
  except ValueError as error:
    raise ValueError(
      f"{name} must be a number or broadcast to the lists {leading}, got shape {array.shape}"
    ) from error


def prior_per_list(prior: Any, scores: jax.Array) -> jax.Array:
  """Broadcasts a prior to ``[..., 1]``, with NaN for values outside [0, 1].

  A traced value cannot raise an error.
  """
  (array,) = masks.promote(prior, names=("prior",))
  return per_list("prior", jnp.where((array >= 0.0) & (array <= 1.0), array, jnp.nan), scores)
