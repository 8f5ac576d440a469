r"""Makes a step again that was not finite, and shows where the first numbers broke.

soprc replay --workdir=runs/glyphs [--step=N] [--own_loss=package.module:function]

A training that meets a NaN or an infinity stops, or skips the step (train.on_nonfinite), and keeps
the state before it and its batch in WORKDIR/diverged/N. Nothing else is needed here: neither the
data nor the config file; a loss of your own must be named, since a folder alone may not run code.
Exit status 0, whatever the step shows.
"""

from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("workdir")

_STEP = absl_flags.DEFINE_integer(
  "step", None, "The step; by default the last one that the run keeps.", lower_bound=1
)

_OWN_LOSS = absl_flags.DEFINE_multi_string(
  "own_loss",
  [],
  "package.module:function, the loss of your own (loss.name, warmup.loss) that the run was trained "
  "with.",
)


def main(argv: Sequence[str]) -> None:
  workdir = flags.existing_folder(argv, "--workdir=runs/glyphs")
  from soprc_jax.training import replay

  flags.prepare_jax()
  with flags.errors_as_messages():
    print(replay.describe(workdir, _STEP.value, trusted=_OWN_LOSS.value))


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
