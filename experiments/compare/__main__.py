r"""Compares methods under one protocol: same start, batches and budget, over several seeds.

The learning rate of each method is chosen on the validation split.

soprc compare --config=glyphs:compare --workdir=runs/compare
soprc compare --config=glyphs:compare,finetune --workdir=runs/compare_finetune \
    --init_from='runs/compare/triplet-lr0.008-seed{seed}'

Every method of config.compare.methods runs each learning rate of config.compare.rates at the first
of config.compare.seeds. Its learning rate with the best validation mAUPRC also runs at the other
seeds. The flags below replace these values. A method is one of:

* a loss: triplet, smooth_ap, or package.module:function for a custom loss;
* a preset of SOPRC: paper, authors;
* soprc: the config as it is;
* any other argument of the config file, such as ablation1.

With --trials=N every method makes N random trials instead, over the same number of dimensions: its
learning rate (from the lowest to the highest of --rates), the sampler of its batches (random
classes, or groups of 2, 4 or 8 confusable ones), and the hyperparameter of its loss that matters
most. The second half of the trials is drawn from a larger space if the best of the first half lies
at an edge. The trials have their own seed, and their own split of the classes unless the data give
the split. The best trial of each method then runs at config.compare.seeds on the split of the
config. table.md has the spaces, the best trials, and the best validation result to expect of fewer
trials.

With --config.compare.soprc_with_sgd=true SOPRC trains by SGD and the others by Adam, as in the
paper's appendix.

Each run has a folder in WORKDIR. The same command resumes where it stopped. WORKDIR receives
table.md, table.json, pr_curves.png (mean over seeds of the mean precision-recall curves on test)
and convergence.png (mean over seeds of mAUPRC on val).

It is an error if an initial model was trained on classes of val or test. --allow_seen_classes notes
them in the results and the table instead.
"""

from collections.abc import Sequence
import logging
import shlex
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("config")
absl_flags.declare_key_flag("workdir")
_METHODS = absl_flags.DEFINE_list(
  "methods", None, "Methods; the first one is compared with the others. Default: config.compare."
)
_RATES = absl_flags.DEFINE_list(
  "rates",
  None,
  "Grid of learning rates, the same for every method (not for SOPRC with soprc_with_sgd). Default: "
  "config.compare.",
)
_SEEDS = absl_flags.DEFINE_list(
  "seeds", None, "Seeds of weights, batches and augmentation. Default: config.compare."
)
_TRIALS = absl_flags.DEFINE_integer(
  "trials",
  None,
  "Random trials of each method (at least 2) over learning rate, sampler and a hyperparameter of "
  "its loss, instead of the grid of learning rates. Default: config.compare.",
  lower_bound=0,
)
_INIT_FROM = absl_flags.DEFINE_string(
  "init_from",
  None,
  "Workdir of the run whose model every method starts from; {seed} is replaced by the seed. "
  "Default: config.compare; empty: random weights.",
)

_ALLOW_SEEN = absl_flags.DEFINE_bool(
  "allow_seen_classes",
  False,
  "Start from models also if they were trained on classes of val or test: a warning and a note in "
  "the results instead of an error.",
)
_LIST = absl_flags.DEFINE_bool(
  "list", False, "Print the runs and the estimated time, and start none."
)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv)
  from experiments.compare import comparison, plans
  from soprc_jax.training import config as config_lib

  with flags.errors_as_messages():
    plan = plans.read_plan(_settings())
    _refuse_lost_overrides()
    rated = config_lib.fill(run.config, {"optim.learning_rate": plan.rates[0]})  # from the plan
    flags.choose(comparison.choices(rated, run.workdir))
    comparison.check(plan, _make_config, run.workdir, allow_seen_classes=_ALLOW_SEEN.value)
    first = plans.run_config(
      plan, _make_config, plans.RunName(plan.methods[0], plan.rates[0], plan.seeds[0])
    )
    if _LIST.value:
      _print_plan(plan, first, run)
      return
    shared = plans.shared(first, with_trials=bool(plan.trials))
    comparison.claim(shared, plan.starts(), run.workdir, data=first.data)
    _logger().info("%s; written to %s.", plans.describe(plan), run.workdir)
    _compare(plan, run)


def _print_plan(plan: Any, first: Any, run: flags.Run) -> None:
  """Prints the runs of each method and the estimated time that is left.

  The estimate is from a few steps of the first method.
  """
  from experiments.compare import comparison, plans, random_search, step_cost
  from soprc_jax._internal import text_table
  from soprc_jax.training import parallel, progress

  seconds = step_cost.run_seconds(first)(first)
  rows, left = [], 0
  for method in plan.methods:
    total = plans.num_runs(plan._replace(methods=(method,)))
    ended = min(comparison.num_finished(run.workdir, plan, method), total)
    left += total - ended
    if plan.trials:
      tried = "; ".join(map(str, random_search.space(method, plan.rates)))
    else:
      tried = ", ".join(f"{rate:g}" for rate in plans.rates_of(plan, method))
    rows.append([method, tried, str(total), str(ended)])
  header = ["method", "searched" if plan.trials else "learning rates", "runs", "finished"]
  print(text_table.markdown(header, rows))
  print(
    f"{left} runs are left, about {progress.duration(left * seconds)} on {parallel.describe()} "
    f"({progress.duration(seconds)} a run, measured on {plan.methods[0]}). Nothing was started."
  )


def _compare(plan: Any, run: flags.Run) -> None:
  from experiments.compare import comparison, plans
  from experiments.compare import outputs as report

  flags.prepare_jax()
  rows = comparison.run_all(plan, _make_config, run.workdir, allow_seen_classes=_ALLOW_SEEN.value)
  configs = {
    row.method: plans.run_config(plan, _make_config, row.runs[0], row.trials and row.trials.values)
    for row in rows
  }
  print(report.write(run.workdir, plan, rows, configs))
  print(f"Written to {run.workdir}: table.md, table.json, pr_curves.png, convergence.png")
  print(f"Report: soprc report --workdir={shlex.quote(str(run.workdir))}")


def _settings() -> Any:
  """Returns ``config.compare`` with the flags in place of its values."""
  from experiments.compare import plans

  config = flags.load_config()
  settings = config.get("compare", plans.default_settings())
  with settings.unlocked():
    settings.init_from = settings.init_from or config.model.init_from
    try:
      for key, flag, kind in (
        ("methods", _METHODS, str),
        ("rates", _RATES, float),
        ("seeds", _SEEDS, int),
      ):
        if flag.value is not None:
          settings[key] = tuple(kind(value) for value in flag.value)
    except ValueError as error:
      raise ValueError(f"--{key}: {error}") from None
    if _TRIALS.value is not None:
      settings.trials = _TRIALS.value
    if _INIT_FROM.value is not None:
      settings.init_from = _INIT_FROM.value
  return settings


def _make_config(method: str) -> Any:
  """Returns the config file with a method, and the overrides of the command line."""
  from soprc_jax.training import methods

  if not methods.is_method(method) and ":" not in method:
    return flags.load_config(argument=method)
  return flags.load_config(change=lambda config: methods.choose(config, method))


def _refuse_lost_overrides() -> None:
  from experiments.compare import plans
  from soprc_jax.training import methods

  for argument in flags.config_arguments():
    if methods.is_method(argument):
      raise ValueError(
        f"--config=FILE:{argument} names a method, but the comparison sets the method of every "
        f"run: use --methods={argument}"
      )
  for key in flags.config_overrides():
    if key in plans.OWN_KEYS:
      raise ValueError(
        f"--config.{key} is set by the comparison in every run: use {plans.OWN_KEYS[key]}"
      )
    if key == "optim.name" and _settings().soprc_with_sgd:
      raise ValueError(
        "--config.optim.name needs compare.soprc_with_sgd=False: with True SOPRC uses sgd and the "
        "others adam"
      )


def _logger() -> logging.Logger:
  return logging.getLogger("soprc_jax.compare")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
