r"""Trains an embedding model and tests it, or resumes a run that was stopped.

soprc train --config=glyphs --workdir=runs/glyphs [--config.KEY=VALUE ...]

WORKDIR receives results.json (validation and test metrics), metrics.jsonl (one line per step),
convergence.png, pr_curve.png, tensorboard/, checkpoints/ (newest) and best/ (best validation
mAUPRC). Printed next to the test metrics are those of thumbnails and of the model before training.
The same command on the same folder resumes the run, bit for bit. It is an error if the
config is another one, or if the data have changed since.

It is an error if the initial model (model.init_from) was trained on classes of val or test.
--allow_seen_classes notes them in results.json instead.

--minutes=5 chooses train.steps, so that the command takes about five minutes on this machine.
Unless they are set, eval.every and checkpoint.every become a tenth of the steps. The same command
resumes with the steps that were chosen.
"""

from collections.abc import Sequence
import shlex
import time
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

_BEGAN = time.perf_counter()
absl_flags.adopt_module_key_flags(flags)
_MINUTES = absl_flags.DEFINE_float(
  "minutes",
  None,
  "Wall time of the whole command, in which it trains for as many steps as it can; instead of "
  "--config.train.steps.",
)
_ALLOW_SEEN = absl_flags.DEFINE_bool(
  "allow_seen_classes",
  False,
  "Start from a model (model.init_from) also if it was trained on classes of val or test: a "
  "warning and a note in the results instead of an error.",
)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv, several_processes=True, change=_open_steps)
  # Imported after the flags are checked, so that a typo costs no start-up of the device.
  from soprc_jax._internal import text_table
  from soprc_jax.training import budget, config, loop, parallel, trivial_baselines

  with flags.errors_as_messages():
    unused = config.unused_problems(run.config, flags.config_overrides())
    if unused:
      raise ValueError("\n".join(unused))
    flags.prepare_jax()
    command = {"config": flags.config_name(), "overrides": flags.config_overrides()}
    minutes = _MINUTES.value
    results = loop.train(
      run.config,
      run.workdir,
      allow_seen_classes=_ALLOW_SEEN.value,
      command=command,
      time_budget=None if minutes is None else budget.Budget(minutes, _BEGAN),
    )
  if not parallel.is_main():
    return
  print(flags.metrics_line("test", results["test"]))
  names, rows = trivial_baselines.table(results, "test")
  cells = [[title, *(f"{value:.4f}" for value in values)] for title, values in rows]
  if cells:
    print("\n".join(text_table.aligned([["", *names], *cells])))
  print(
    f"Results: {run.workdir / 'results.json'}; plots in the same folder: convergence.png and "
    "pr_curve.png."
  )
  print(f"Report: soprc report --workdir={shlex.quote(str(run.workdir))}")


def _open_steps(config: Any) -> None:
  """Leaves the keys open that --minutes chooses."""
  if _MINUTES.value is not None:
    from soprc_jax.training import budget

    budget.check(_MINUTES.value)
    budget.open_config(config, flags.config_overrides())


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
