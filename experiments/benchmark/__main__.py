r"""Benchmarks the speed against other packages, and the cost against size.

The tables have ratios of ours to each peer, timed in turns in one run.

soprc benchmark NAME [NAME ...] [--out=FILE.json] [--workdir=DIR]

NAME is loss, auprc, metrics, gallery, train, input, startup, scale, or all (one after the other,
each in a separate process). To install the peers: pip install -e ".[bench]".

The table goes to the standard output. FILE.json receives the rows. DIR receives table.md,
benchmark.json and log-log plots of cost against size with the fitted exponents, which take some
minutes more. Existing results are not overwritten. All benchmarks take 25 to 35 minutes on two idle
cores. Other work on the machine affects the measured times.
"""

from collections.abc import Sequence
import importlib
import json
import logging
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

NAMES = ("loss", "auprc", "metrics", "gallery", "train", "input", "startup", "scale")
_EXAMPLE = "auprc --workdir=runs/benchmark"

absl_flags.declare_key_flag("workdir")
_NOTE = "benchmark.json"
_OUT = absl_flags.DEFINE_string("out", None, "JSON file for the rows and curves; must not exist.")


def main(argv: Sequence[str]) -> None:
  names = _names(list(argv[1:]))
  folder = flags.folder([argv[0]], _EXAMPLE, _NOTE) if absl_flags.FLAGS.workdir else None
  flags.require([argv[0]], _EXAMPLE)
  from experiments.benchmark import speed_tables
  from soprc_jax.training import workdir

  with flags.errors_as_messages():
    out = _new_file(_OUT.value)
    if folder is not None and (folder / _NOTE).exists():
      raise ValueError(
        f"--workdir={folder} already has {_told(folder / _NOTE)}: choose a new folder, or remove it"
      )
    began = time.perf_counter()
    run = _run_apart if len(names) > 1 else lambda names, grows: _run(names[0], grows=grows)
    rows, curves, failed = run(names, grows=folder is not None)
    about = {
      "machine": speed_tables.machine(),
      "date": time.strftime("%Y-%m-%d"),
      "seconds": round(time.perf_counter() - began),
    }
    content = json.dumps(speed_tables.as_json(rows, curves, about), indent=1) + "\n"
    table = speed_tables.markdown(rows)
    if out is not None:
      workdir.write_atomically(out, content)
    if folder is not None:
      folder.mkdir(parents=True, exist_ok=True)
      workdir.write_atomically(folder / _NOTE, content)
      workdir.write_atomically(folder / "table.md", table)
      pictures = speed_tables.plot_growth(folder, curves)
  print(table)
  print(
    f"{about['machine']}; {about['date']}; {about['seconds']} s. A ratio above 1 means that ours "
    "is faster."
  )
  for curve in curves:
    print(
      f"{curve.benchmark}, {curve.name}: {curve.cost} by {curve.size} with exponent "
      f"{curve.exponent:.2f}"
    )
  if folder is not None:
    print(f"Written to {folder}: {', '.join(['table.md', _NOTE, *pictures])}")
  if failed:
    sys.exit(f"Error: failed, see the messages above: {', '.join(failed)}")


def _names(given: list[str]) -> list[str]:
  """Returns the requested benchmarks.

  Ends the process with a message if one is unknown, or none is named.
  """
  with flags.errors_as_messages():
    if not given:
      raise ValueError(
        f"missing NAME. For example:\n  soprc benchmark {_EXAMPLE}\nNames: {', '.join(NAMES)}, all"
      )
    names = list(NAMES) if given == ["all"] else given
    unknown = [name for name in names if name not in NAMES]
    if unknown or len(set(names)) < len(names):
      raise ValueError(
        f"unknown or repeated benchmark {', '.join(unknown or given)!r}: give one or more of "
        f"{', '.join(NAMES)}, or all"
      )
  return names


def _told(path: Path) -> str:
  """Describes an existing results file, which may have any content."""
  try:
    content = json.loads(path.read_bytes())
    return f"the {path.name} of {content['date']}, {content['machine']}"
  except (ValueError, RecursionError, KeyError, TypeError, OSError):
    return f"a {path.name} that cannot be read"


def _new_file(name: str | None) -> Path | None:
  if name is None:
    return None
  from soprc_jax._internal import file_io

  path = file_io.given(name, name="--out").absolute()
  if path.exists():
    raise ValueError(f"--out={path} exists: choose a new file")
  if not path.parent.is_dir():
    raise ValueError(f"--out={path}: there is no folder {path.parent}")
  return path


def _run(name: str, *, grows: bool) -> tuple[list[Any], list[Any], list[str]]:
  """Returns rows and curves of one benchmark, logged as they come, and no failures."""
  log = logging.getLogger("soprc_jax.benchmark")
  module = importlib.import_module(f"experiments.benchmark.{name}")
  rows, curves = [], []
  try:
    for row in module.rows():
      rows.append(row)
      log.info(
        "%s, %s: %.2f x %s (target %.2f)", row.benchmark, row.case, row.ratio, row.peer, row.target
      )
    if grows:
      for curve in module.growth():
        curves.append(curve)
        log.info(
          "%s, %s: %s by %s with exponent %.2f",
          curve.benchmark,
          curve.name,
          curve.cost,
          curve.size,
          curve.exponent,
        )
  except ModuleNotFoundError as error:
    raise ValueError(
      f'the benchmark {name} needs {error.name}: pip install -e ".[bench]"'
    ) from error
  return rows, curves, []


def _run_apart(names: Sequence[str], *, grows: bool) -> tuple[list[Any], list[Any], list[str]]:
  """Returns rows and curves of several benchmarks, and the names of those that failed.

  Each runs in a separate process, so that none leaves threads or memory to the next.
  """
  from experiments.benchmark import speed_tables

  rows, curves, failed = [], [], []
  with tempfile.TemporaryDirectory(prefix="soprc_jax_benchmark_") as folder:
    for name in names:
      extra = [f"--workdir={folder}/{name}_growth"] if grows else []
      command = [
        sys.executable,
        "-m",
        "experiments.benchmark",
        name,
        f"--out={folder}/{name}.json",
        *extra,
      ]
      if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        failed.append(name)
        continue
      found = speed_tables.from_json(
        json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8"))
      )
      rows += found[0]
      curves += found[1]
  return rows, curves, failed


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
