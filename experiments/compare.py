r"""Compares methods under one protocol: same start, batches and budget; learning rates picked on val.

python -m experiments.compare --config=configs/glyphs.py --methods=soprc,triplet --rates=0.002,0.004,0.008 \
    --seeds=0,1,2 --workdir=runs/compare
python -m experiments.compare --config=configs/glyphs.py:finetune --methods=soprc,triplet --rates=0.0005,0.001,0.002 \
    --seeds=0,1,2 --init_from='runs/compare/triplet-lr0.004-seed{seed}' --workdir=runs/compare_finetune

A method is an argument of the config file; ``soprc`` is the file as it is. Every method runs each rate at the first seed, and its best rate on
val at the other seeds. Each run has a folder in WORKDIR; the same command goes on where it stopped. The table goes to WORKDIR/table.md and table.json.
"""

from collections.abc import Sequence
import json
import logging
import runpy
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.adopt_module_key_flags(flags)
_METHODS = absl_flags.DEFINE_list(
  "methods", ["soprc", "triplet"], "Arguments of the config file; the first is compared with the others."
)
_RATES = absl_flags.DEFINE_list("rates", ["0.002", "0.004", "0.008"], "Grid of learning rates, the same for every method.")
_SEEDS = absl_flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of weights, batches and augmentation.")
_INIT_FROM = absl_flags.DEFINE_string(
  "init_from",
  "",
  "Workdir of the run that every method starts from; {seed} is replaced by the seed. Empty: random weights.",
)
_METRICS = ("mAUPRC", "recall@1", "recall@10")


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv)
  from soprc_jax.training import comparison
  from soprc_jax.training import workdir as workdir_lib

  methods, rates, seeds = _METHODS.value, [float(rate) for rate in _RATES.value], [int(seed) for seed in _SEEDS.value]
  log = logging.getLogger("soprc_jax.compare")
  total = len(methods) * (len(rates) + len(seeds) - 1)
  log.info("%d runs in %s: %s at %s, seeds %s.", total, run.workdir, ", ".join(methods), rates, seeds)
  summaries = []
  with flags.errors_as_messages():
    for method in methods:
      for rate in rates:
        _train(run, comparison.RunName(method, rate, seeds[0]))
      best = comparison.best_rate(run.workdir, method, rates, seeds[0])
      if len(rates) > 1 and best in (min(rates), max(rates)):
        log.info("The best rate of %s, %g, is at the edge of the grid: a wider grid may find a better one.", method, best)
      for seed in seeds[1:]:
        _train(run, comparison.RunName(method, best, seed))
      summaries.append(comparison.summarize(run.workdir, method, best, seeds, _METRICS))
  table = comparison.markdown(summaries, len(seeds))
  workdir_lib.write_atomically(run.workdir / "table.md", table)
  rows = [
    {"method": row.method, "rate": row.rate, "seeds": seeds} | {name: list(value) for name, value in row.values.items()}
    for row in summaries
  ]
  workdir_lib.write_atomically(run.workdir / "table.json", json.dumps(rows, indent=2) + "\n")
  print(table)


def _train(run: flags.Run, name: Any) -> None:
  """One run of the comparison, unless it has finished before."""
  import jax

  from soprc_jax.training import comparison, loop
  from soprc_jax.training import config as config_lib
  from soprc_jax.training import workdir as workdir_lib

  config, folder = config_lib.resolve(_config(name)), run.workdir / name.folder()
  if comparison.read(run.workdir, name) is not None:
    workdir_lib.check(folder, config)  # a finished run of another config must not enter the table
    return
  logging.getLogger("soprc_jax.compare").info("Run %s", name.folder())
  jax.config.update("jax_compilation_cache_dir", str(run.workdir / ".jax_cache"))
  loop.train(config, folder)


def _config(name: Any) -> Any:
  """The config file with the method among its arguments, the overrides of the command line, the rate and the seed."""
  path, _, argument = flags.config_name().partition(":")
  arguments = [part for part in (argument, "" if name.method == "soprc" else name.method) if part]
  config = runpy.run_path(path)["get_config"](",".join(arguments))
  config.update_from_flattened_dict(flags.config_overrides())
  config.optim.learning_rate = name.rate
  config.seed = name.seed
  config.model.init_from = _INIT_FROM.value.format(seed=name.seed)
  return config


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
