r"""Runs ablations of SOPRC on any config, over seeds.

They cover the paper's Table 2, batch sizes, every hyperparameter, the prior and its schedule.

soprc ablate --config=glyphs:compare --config.optim.learning_rate=0.008 --workdir=runs/ablation
soprc ablate --config=glyphs:compare --workdir=runs/ablation --stages=table2 --list

The program first prints the number of runs of each stage and their time, measured on this machine
(glyphs: 40 seconds a run on two CPU cores). It starts no run that would end after --minutes. The
same command resumes, also in the middle of a run that was killed. Runs that stages share are made
once.

Stages:

* table2: each row at the best learning rate of config.compare on the validation split;
* batch_size, tau1, tau2, beta, num_points, lambda1, lambda2, prior: one key each;
* schedule: annealed prior, narrowed tau1;
* start_of_v: the initial value of v;
* per_class: images of a class in a batch, with v carried and of the batch;
* exact_v: v carried, of the batch, and of all images of the class at that step;
* gradient: through T, and other choices;
* tuned: SOPRC, SmoothAP and triplet, each with three values of a hyperparameter at every learning
  rate.

All stages except table2 and tuned run at config.optim.learning_rate.

WORKDIR receives a folder for each run and ablation.json. Each stage has a table STAGE.md and a plot
STAGE.png: mAUPRC, the norm of the gradient and the share of saturated lists by step.

It is an error if an initial model was trained on classes of val or test. --allow_seen_classes notes
them in the results and the tables instead.
"""

from collections.abc import Callable, Sequence
import logging
import math
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("config")
absl_flags.declare_key_flag("workdir")
_STAGES = absl_flags.DEFINE_list("stages", None, "Stages to run, in this order. Default: all.")
_SEEDS = absl_flags.DEFINE_list(
  "seeds",
  None,
  "Seeds of weights, batches and augmentation; the first one chooses learning rates. Default: "
  "config.compare.",
)
_MINUTES = absl_flags.DEFINE_float(
  "minutes",
  40.0,
  "No run is started that would end later than this. The first run is always started.",
  lower_bound=0.0,
)
_INIT_FROM = absl_flags.DEFINE_string(
  "init_from",
  None,
  "Workdir of the run whose model all runs start from; {seed} is replaced by the seed. Default: "
  "config.compare, else random weights.",
)
_LIST = absl_flags.DEFINE_bool(
  "list", False, "Print the planned runs and their estimated time, and start none."
)
_ALLOW_SEEN = absl_flags.DEFINE_bool(
  "allow_seen_classes",
  False,
  "Start from models also if they were trained on classes of val or test: a warning and a note in "
  "the results instead of an error.",
)
# Keys that the ablation sets in every run, or does not read: an override would have no effect.
_OWN_KEYS = {
  "seed": "--seeds",
  "model.init_from": "--init_from",
  "loss.name": "--stages",
  "loss.preset": "--stages",
  "compare.methods": "--stages",
  "compare.soprc_with_sgd": "--stages=table2",
}


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv)
  from experiments.ablate import ablation, ablation_report
  from experiments.compare import comparison
  from soprc_jax.training import config as config_lib

  with flags.errors_as_messages():
    values = comparison.choices(run.config, run.workdir)
    flags.choose(values)
    run = run._replace(config=config_lib.fill(run.config, values))
    plan = _plan(run.config)
    ablation.check(plan, _make_config, run.workdir, allow_seen_classes=_ALLOW_SEEN.value)
    if not _LIST.value:
      ablation.claim(plan, _make_config, run.workdir)
      flags.prepare_jax()
    seconds = ablation.seconds_a_run(plan, _make_config)
    _tell_plan(ablation.planned(plan, run.workdir), seconds)
    if _LIST.value:
      return
    try:
      done = ablation.run(
        plan,
        _make_config,
        run.workdir,
        minutes=_MINUTES.value,
        seconds=seconds,
        allow_seen_classes=_ALLOW_SEEN.value,
      )
    finally:
      # Also if a run has failed: the results of the others are reported.
      results = ablation.results(plan, run.workdir)
      names = ablation_report.write(run.workdir, plan, results)
    names += _write_gradient(plan, run)
  for stage in plan.stages:
    if results[stage.name]:
      print(f"\n{(run.workdir / f'{stage.name}.md').read_text(encoding='utf-8')}")
  print(f"Written to {run.workdir}: {', '.join(names)}")
  if not done:
    left = [
      option
      for runs in ablation.planned(plan, run.workdir).values()
      for option, ended in runs
      if not ended
    ]
    print(f"{len(left)} runs are left, about {_minutes(left, seconds)}: the same command resumes.")


def _write_gradient(plan: Any, run: flags.Run) -> list[str]:
  """Writes what the gradient through T does to the positives.

  It is measured at random weights and at the trained model of the config's own run.
  """
  from experiments.ablate import ablation, gradient_through_t
  from experiments.compare import comparison, plans
  from soprc_jax.training import workdir

  name = plans.RunName("soprc", run.config.optim.learning_rate, plan.seeds[0])
  if "gradient" not in [stage.name for stage in plan.stages] or "val" not in (
    comparison.finished(run.workdir, name) or {}
  ):
    return []
  config = ablation.run_config(plan, _make_config, ablation.BASE, name.rate, name.seed)
  text = gradient_through_t.markdown(
    gradient_through_t.measure(config, run.workdir / name.folder()), tau2=config.loss.tau2
  )
  workdir.write_atomically(run.workdir / "gradient_through_t.md", text)
  print(f"\n{text}")
  return ["gradient_through_t.md"]


def _plan(config: Any) -> Any:
  from experiments.ablate import ablation, ablation_stages
  from experiments.compare import plans

  if config.loss.name != "soprc" or config.loss.preset != "default":
    raise ValueError(
      f"an ablation starts from SOPRC with loss.preset=default; the config has {config.loss.name}, "
      f"{config.loss.preset}"
    )
  for key in flags.config_overrides():
    if key in _OWN_KEYS:
      raise ValueError(f"--config.{key} is set by the ablation in every run: use {_OWN_KEYS[key]}")
  if not math.isfinite(_MINUTES.value):
    raise ValueError(f"--minutes must be a finite number, got {_MINUTES.value:g}")
  settings = flags.load_config().get("compare", plans.default_settings())
  if _SEEDS.value is not None:
    try:
      settings.seeds = tuple(int(seed) for seed in _SEEDS.value)
    except ValueError as error:
      raise ValueError(f"--seeds: {error}") from None
  checked = plans.read_plan(settings)
  stages = ablation_stages.make(config, settings)
  chosen = _STAGES.value if _STAGES.value is not None else list(stages)
  if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(stages):
    raise ValueError(
      f"--stages takes one or more of {', '.join(stages)}, each once; got {','.join(chosen)!r}"
    )
  if "table2" in chosen:
    _check_table2(config)
  init_from = _INIT_FROM.value
  if init_from is None:
    init_from = settings.init_from or config.model.init_from
  return ablation.Plan(tuple(stages[name] for name in chosen), checked.seeds, init_from)


def _check_table2(config: Any) -> None:
  """Raises a ValueError if an override conflicts with the rows of Table 2.

  The rows set some keys themselves, and differ in nothing else.
  """
  from configs import common

  lost = sorted(
    {key for row in range(1, 6) for key in common.ablation_values(row)}
    & set(flags.config_overrides())
  )
  if lost:
    raise ValueError(
      f"--config.{lost[0]} is set by the rows of stage table2: leave it out, or choose other "
      "--stages"
    )
  if config.loss.prior.kind == "batch":
    raise ValueError(
      "loss.prior.kind=batch is row 1 of stage table2, the others need another prior: leave it "
      "out, or choose other --stages"
    )


def _make_config(option: Any) -> Any:
  """Returns the config file with the command line's overrides, then an option's values."""
  config = flags.load_config()
  config.update_from_flattened_dict(dict(option.values))
  return config


def _tell_plan(planned: dict[str, list[tuple[Any, bool]]], seconds: Callable[[Any], float]) -> None:
  log = logging.getLogger("soprc_jax.ablate")
  everything = []
  for stage, runs in planned.items():
    left = [option for option, ended in runs if not ended]
    everything += left
    made = f", {len(runs) - len(left)} finished before" if len(left) < len(runs) else ""
    log.info("%-11s %3d runs%s, about %s left", stage, len(runs), made, _minutes(left, seconds))
  log.info(
    "%d runs left in total, about %s; this call takes at most %g min",
    len(everything),
    _minutes(everything, seconds),
    _MINUTES.value,
  )


def _minutes(options: Sequence[Any], seconds: Callable[[Any], float]) -> str:
  return f"{sum(map(seconds, options)) / 60:.0f} min"


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
