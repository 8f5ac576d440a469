r"""Trains imbalanced or multi-label classifiers: SOPRC compared with the usual losses, over seeds.

Binary classification is the original AUPRC problem. Several labels are one such problem each.

soprc train-binary --config=imbalanced:digits --workdir=runs/binary_digits
soprc train-binary --config=multilabel:glyph_labels --workdir=runs/glyph_labels

The data sets are digits, breast_cancer and flights (see configs/imbalanced.py). They come with
packages: pip install -e ".[binary]". On two idle CPU cores digits and breast_cancer take 25 seconds
each and flights 2 minutes; with LibAUC, on a busy machine, 3 and 9 minutes. Any key can be set, for
example --config.loss.tau1=0.3; --helpfull lists them. configs/multilabel.py has data with several
labels, and classes with a long tail.

The test split is one draw (--config.data.split_seed). A seed divides the rest into train and
validation. At each seed all methods start from the same weights and see the same batches. The
learning rate of a method is chosen from config.rates by the mean validation AUPRC over the seeds.
Its model with the best validation AUPRC is tested. --libauc_python=PYTHON adds LibAUC's APLoss (of
several labels mAPLoss) with its optimizer SOAP. The interpreter of another virtual environment
(with torch and libauc) runs it on the same weights and batches.

The table has the methods of the call. A call with fewer config.methods, or without --libauc_python,
writes a shorter table. Finished runs are kept, and a longer call includes them again.

WORKDIR receives results.json (every value), table.md, pr_curves.png (test), convergence.png (val by
step), and runs/ with each finished run. The same command resumes where it stopped.
"""

from collections.abc import Sequence
import functools
import json
import logging
import os
from pathlib import Path
import platform
from typing import Any, NamedTuple
import zlib

from absl import app
from absl import flags as absl_flags
import jax
import numpy as np

from experiments import flags

absl_flags.declare_key_flag("config")
absl_flags.declare_key_flag("workdir")
_LIBAUC_PYTHON = absl_flags.DEFINE_string(
  "libauc_python",
  "",
  "Interpreter with torch and libauc: adds LibAUC's APLoss with SOAP to the comparison, in a "
  "separate process.",
)
# The file of a study with the checksum of its data.
_DATA = "data.json"
_EXAMPLE = "--config=imbalanced:digits --workdir=runs/binary_digits"


def main(argv: Sequence[str]) -> None:
  given = absl_flags.FLAGS
  flags.require(argv, _EXAMPLE, config=given.config, workdir=given.workdir)
  folder, python = (
    flags.folder(argv, _EXAMPLE, "config.json"),
    os.path.expanduser(_LIBAUC_PYTHON.value),
  )
  with flags.errors_as_messages():
    study = prepare(flags.load_config(), folder, python)
    flags.prepare_jax()
    print(make(study, folder, python))
  print(f"Written to {folder}: results.json, table.md, pr_curves.png, convergence.png")


class Study(NamedTuple):
  """A checked study: config, data, methods, content of the results, groups of test examples."""

  config: Any
  table: Any
  methods: list[str]
  about: dict[str, Any]
  groups: Any = None


def prepare(config: Any, folder: Path, python: str) -> Study:
  """Checks everything that would stop the study later, and claims its folder.

  Raises:
    ValueError: a wrong key, a folder of another config, data that do not fit, an interpreter
      without libauc.
  """
  from experiments.binary import (
    binary,
    binary_config,
    binary_losses,
    binary_peer,
    binary_report,
    multilabel_values,
  )
  from soprc_jax.data import multilabel
  from soprc_jax.training import workdir

  config = binary_config.resolve(config)
  shared = binary_config.without_methods(config)
  workdir.check(folder, shared, flags.WRITES[workdir.CONFIG])
  methods, about = list(config.methods), dict[str, Any]()
  if python:
    about["libauc"] = binary_peer.versions(python)
    methods.append(binary_losses.PEER)
  table = binary.load(config)
  data = _checked_data(table, folder)
  splits = binary.prepare(config, table, config.seeds[0]).splits
  about |= {
    "data": (multilabel_values if splits.label_names else binary_report).describe(splits),
    "chance": float(splits.test.labels.mean()),
    "machine": _machine(),
  }
  groups = None
  if isinstance(table, multilabel.Table):
    about["classes"] = multilabel_values.classes(splits)
    groups = table.groups[splits.test.rows]
  workdir.claim(folder, shared, flags.WRITES[workdir.CONFIG])
  workdir.write_atomically(folder / _DATA, data)
  return Study(config, table, methods, about, groups)


def _checked_data(table: Any, folder: Path) -> str:
  """Returns the checksum of a table as JSON, for the file of the study's data.

  Raises:
    ValueError: the folder has a study of other data.
  """
  checksum = 0
  for values in map(np.asarray, jax.tree.leaves(table)):
    plain = values.astype(str) if values.dtype == object else values
    checksum = zlib.crc32(plain.tobytes(), checksum)
  data = json.dumps({"checksum": f"{checksum:08x}"}) + "\n"
  path = folder / _DATA
  if path.exists() and path.read_text() != data:
    raise ValueError(
      f"--workdir={folder} holds a study of other data ({path.read_text().strip()} there, "
      f"{data.strip()} here): restore the data, or choose another folder"
    )
  return data


def make(study: Study, folder: Path, python: str) -> str:
  """Makes the runs that the folder lacks, writes the results and returns the table."""
  from experiments.binary import binary_report, binary_runs

  config, table, methods, about, groups = study
  told = (
    f"{config.data.name}: {about['data']} {len(methods)} methods, {len(config.seeds)} seeds, "
    f"written to {folder}."
  )
  logging.getLogger("soprc_jax.train_binary").info("%s", told)
  rows = binary_runs.run_all(config, table, folder, methods=methods, python=python)
  costs = binary_runs.measure(config, table, folder, rows, python=python)
  return binary_report.write(folder, config, rows, costs, about, groups)


def _machine() -> str:
  import jax

  return (
    f"{os.cpu_count()} CPU cores, {jax.default_backend()}, Python "
    f"{platform.python_version()}, jax {jax.__version__}."
  )


if __name__ == "__main__":
  app.run(
    main, flags_parser=functools.partial(flags.parse, config="experiments.binary.binary_config")
  )
