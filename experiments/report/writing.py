"""Chooses the kind of page for a folder, and writes the page."""

from pathlib import Path

from experiments.compare import comparison_page as comparison
from soprc_jax.reports import page, run
from soprc_jax.training import workdir as workdir_lib

NAME = "report.html"
_TABLE, _COMPARISON = "table.json", "comparison.json"


def write(workdir: Path, output: Path | None = None, *, data_root: Path | None = None) -> Path:
  """Writes the page on the run or the comparison in a folder, and returns its path.

  Args:
    workdir: folder of `soprc train` or `soprc compare`.
    output: HTML file; None: ``WORKDIR/report.html``. An earlier report there is replaced.
    data_root: present place of the run's data; None: the place in its config.

  Raises:
    ValueError: there is nothing to report on; ``output`` is a file other than a report.
    OSError: a file cannot be read or written.
  """
  output = output or workdir / NAME
  check_output(output)
  if (workdir / _TABLE).exists():
    if data_root is not None:
      raise ValueError(
        "--data_root is for the report on a training run; the report on a comparison shows no "
        "images: leave it out"
      )
    text = comparison.make(workdir)
  elif (workdir / _COMPARISON).exists():
    raise ValueError(
      f"the comparison in {workdir} has not finished ({_TABLE} is missing): resume it with its "
      "soprc compare command, and make the report then"
    )
  elif (workdir / workdir_lib.CONFIG).exists():
    text = run.make(workdir, data_root=data_root)
  else:
    raise ValueError(
      f"--workdir={workdir} holds neither a training run ({workdir_lib.CONFIG}) nor a comparison "
      f"({_TABLE}): give the folder of soprc train or soprc compare"
    )
  workdir_lib.write_atomically(output, text)
  return output


def check_output(output: Path) -> None:
  """Raises a ValueError or an OSError if the page cannot be written to ``output``.

  A file that is not a report is not overwritten.
  """
  if output.is_dir():
    raise ValueError(f"--output={output} is a folder: give a file in it")
  if not output.parent.is_dir():
    raise FileNotFoundError(f"--output={output}: there is no folder {output.parent}")
  if output.exists():
    with output.open(encoding="utf-8", errors="replace") as file:
      if not page.is_own(file.read(2000)):
        raise ValueError(
          f"--output={output} exists and is not a report of this program: choose another file, or "
          "remove it"
        )
