r"""Makes one HTML page on a finished training run or comparison; the page needs no other files.

soprc report --workdir=runs/glyphs [--output=FILE.html] [--data_root=IMAGES]

The page on a run has:

* results next to the paper's numbers;
* convergence, mean precision-recall curve and average precision by class;
* queries with their nearest images, and confusable classes;
* v, the moving average of the positive scores of a class;
* time, config and versions.

The test images are embedded again with the model that was tested. If the data are gone, the page
has no images and says so.

The page on a comparison has the table of methods, curves, learning rates and costs.

The page is WORKDIR/report.html unless --output names another file. An earlier report is replaced.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("workdir")
_OUTPUT = absl_flags.DEFINE_string("output", None, "HTML file. Default: WORKDIR/report.html.")
_DATA_ROOT = absl_flags.DEFINE_string(
  "data_root",
  None,
  "Place of the run's data, if they have moved. Default: data.root of its config.",
)


def main(argv: Sequence[str]) -> None:
  workdir = flags.existing_folder(argv, "--workdir=runs/glyphs")
  from experiments.report import writing

  flags.prepare_jax()
  with flags.errors_as_messages():
    output, data_root = _path("output", _OUTPUT.value), _path("data_root", _DATA_ROOT.value)
    if data_root is not None and not data_root.exists():
      raise FileNotFoundError(f"--data_root={data_root}: there is no such folder or file")
    path = writing.write(workdir, output, data_root=data_root)
  print(f"Report: {path} ({path.stat().st_size / 2**20:.1f} MB); open it in a browser.")


def _path(flag: str, value: str | None) -> Path | None:
  from soprc_jax._internal import file_io

  return file_io.given(value, name=f"--{flag}").absolute() if value else None


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
