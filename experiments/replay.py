r"""Repeats a training step that was not finite, and shows where the first such numbers appeared.

soprc replay --workdir=runs/glyphs [--step=N] [--own_loss=package.module:function]

At a NaN or an infinity, training stops or skips the step (train.on_nonfinite). It keeps the state
before the step and its batch in WORKDIR/diverged/N. Replaying needs neither the data nor the config
file. A custom loss must be named, since a folder alone may not run code. The exit status is 0 for
finite and non-finite steps alike.
"""

from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("workdir")

_STEP = absl_flags.DEFINE_integer(
  "step", None, "Step to repeat. Default: the last one that the run keeps.", lower_bound=1
)

_OWN_LOSS = absl_flags.DEFINE_multi_string(
  "own_loss",
  [],
  "package.module:function, the custom loss (loss.name, warmup.loss) that the run was trained "
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
