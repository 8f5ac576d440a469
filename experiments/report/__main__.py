r"""Makes one HTML page on a finished training run, or on a finished comparison; the page needs
nothing but itself.

soprc report --workdir=runs/glyphs [--output=FILE.html] [--data_root=IMAGES]

Of a run: results with the paper's numbers beside them, convergence, mean precision-recall curve,
average precision by class, queries with their nearest images, classes that are taken for each
other, the tracked scores v, time, config and versions. The test images are embedded once more by
the network that was tested; where the data are gone, the page goes without pictures and says so. Of
a comparison: the table of methods, curves, learning rates and costs. The page is
WORKDIR/report.html unless --output names another file; an earlier report is replaced.
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
  "Where the data of the run are now, if they have moved. Default: data.root of its config.",
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
