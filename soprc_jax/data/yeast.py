"""Reads the multi-label data set yeast from the Debian package ``r-cran-mlr``.

2,417 genes of yeast have 103 features from microarrays and phylogenetic profiles, and 14 groups of
functions, of which a gene has several. It is from Elisseeff & Weston, "A kernel method for
multi-labelled classification", NIPS 2001.
"""

from pathlib import Path
from typing import Any
import warnings
import zlib

import numpy as np

from soprc_jax._internal import file_io

_FILES = "usr/lib/R/site-library/mlr/data/Rdata"
_TASK = "yeast.task"
_REMEDY = "apt-get download r-cran-mlr, dpkg-deb -x r-cran-mlr_*.deb FOLDER, data.root=FOLDER"


def load(root: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
  """Loads features ``[2417, 103]`` float32, labels ``[2417, 14]`` bool and the names of the labels.

  Args:
    root: folder into which the package is unpacked.

  Raises:
    FileNotFoundError: there is no such folder, or it lacks the files of the package.
    ValueError: the package ``rdata`` is missing, or the files are of another version.
  """
  if not root:
    raise ValueError(f"the data set yeast needs data.root, the unpacked package: {_REMEDY}")
  folder = file_io.given(root, name="data.root")
  index, store = (folder / f"{_FILES}.{kind}" for kind in ("rdx", "rdb"))
  for path in (index, store):
    if not path.is_file():
      raise FileNotFoundError(f"{path} is missing: {_REMEDY}")
  try:
    import rdata
  except ImportError:
    raise ValueError(
      'the data set yeast needs the package rdata: pip install -e ".[binary]"'
    ) from None
  try:
    return tables(_frame(rdata, index, store.read_bytes()))
  except (KeyError, IndexError, zlib.error) as error:
    raise ValueError(
      f"{store} has no {_TASK} as in version 2.19.1 ({error!r}): {_REMEDY}"
    ) from error


def tables(frame: Any) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
  """Returns features, labels and names of a data frame with columns ``label*`` and ``x*``.

  Raises:
    ValueError: a value is missing.
  """
  names = tuple(str(name) for name in frame.columns if str(name).startswith("label"))
  labels = frame[list(names)]
  features = frame[[name for name in frame.columns if str(name).startswith("x")]]
  if labels.isna().any(axis=None) or features.isna().any(axis=None):
    raise ValueError("the data frame of yeast has a missing value: download the package again")
  return features.to_numpy(np.float32), labels.to_numpy(bool), names


def _frame(rdata: Any, index: Path, store: bytes) -> Any:
  """Returns the data frame in R's lazy-load database: an index of records, and the records.

  A task is an environment, which has a record of its own: and holds the data frame.
  """

  def parsed(packed: bytes) -> Any:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # rdata warns of classes that it does not know
      return rdata.conversion.convert(rdata.parser.parse_data(packed))

  places = _by_text(parsed(zlib.decompress(index.read_bytes(), wbits=31)))
  begin = int(_by_text(places["variables"])[_TASK][0])
  # The environment of a task is written before the task itself.
  ends = {int(sum(place)): int(place[0]) for place in _by_text(places["references"]).values()}
  # The first four bytes of a record are its size.
  environment = parsed(zlib.decompress(store[ends[begin] + 4 : begin]))
  return _by_text(_by_text(environment)["bindings"])["data"]


def _by_text(found: Any) -> dict[str, Any]:
  """Returns a dictionary with plain strings as keys."""
  return {str(key): value for key, value in found.items()}
