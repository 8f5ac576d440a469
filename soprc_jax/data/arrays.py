"""Arrays in files, read back whole or not at all."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def read(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
  """The arrays of these names in an ``.npz`` file.

  Raises:
    OSError: the file is not there, or may not be read.
    ValueError: it is damaged, or holds no such arrays.
  """
  # Opened here: numpy leaves the file of a damaged archive open.
  with path.open("rb") as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in names}
    # A flipped bit can claim an encryption, a compression or a size of its own: numpy, zipfile and zlib fail at it in a dozen ways.
    except Exception as error:
      reason = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
      raise ValueError(f"{path} is damaged ({reason})") from error
