r"""Trains an embedding network and tests it; goes on where a killed run stopped.

soprc train --config=glyphs --workdir=runs/glyphs [--config.KEY=VALUE ...]

WORKDIR receives results.json (val and test metrics), metrics.jsonl (one line a step),
convergence.png, pr_curve.png, tensorboard/, checkpoints/ (newest) and best/ (best on val). The same
command on the same folder resumes, bit for bit; another config is refused, and so are data that
have changed since.

A network to start from (model.init_from) that was trained on classes of val or test is an error;
--allow_seen_classes notes them in results.json instead.
"""

from collections.abc import Sequence
import shlex

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.adopt_module_key_flags(flags)
_ALLOW_SEEN = absl_flags.DEFINE_bool(
  "allow_seen_classes",
  False,
  "Start from a network (model.init_from) also if it was trained on classes of val or test: a "
  "warning and a note in the results instead of an error.",
)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv, several_processes=True)
  # Imported after the flags are checked, so that a typo costs no start-up of the device.
  from soprc_jax.training import config, loop, parallel

  with flags.errors_as_messages():
    unused = config.unused_problems(run.config, flags.config_overrides())
    if unused:
      raise ValueError("\n".join(unused))
    flags.prepare_jax()
    command = {"config": flags.config_name(), "overrides": flags.config_overrides()}
    results = loop.train(
      run.config, run.workdir, allow_seen_classes=_ALLOW_SEEN.value, command=command
    )
  if not parallel.is_main():
    return
  print(flags.metrics_line("test", results["test"]))
  print(
    f"Results: {run.workdir / 'results.json'}; pictures: convergence.png and pr_curve.png beside "
    "it."
  )
  print(f"Report: soprc report --workdir={shlex.quote(str(run.workdir))}")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
