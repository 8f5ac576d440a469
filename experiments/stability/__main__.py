r"""Measures the stability of SOPRC and its generalization gap, compared with the paper's theory.

The theory is Def. 1 and Theorems 1 and 2.

soprc stability --workdir=runs/stability

A small model is trained on S, and on S with one positive (or one negative) replaced by a new draw.
Start and batches are the same. Epsilon is the mean distance of the parameters. It is measured
against T, n+, n-, N+, N-, beta and the learning rate, at a constant learning rate and under the
conditions of Theorem 2. The algorithms are SOPRC, SOPRC without v, the AP loss and two variants of
SOPRC. There are 226 settings with 128 repetitions, and 8 positives and 8 negatives are replaced in
each. With 142 settings this took 13 minutes of CPU time in two threads: 7 to 13 minutes on two idle
cores, 28 on busy ones.

WORKDIR receives stability.json with each setting as soon as it is measured, so that the same
command resumes after a kill. It also receives table.md (slopes, a comparison of the algorithms, and
what agrees with the paper) and plots as PNG files, for the sweeps and algorithms of the call. A
second call makes them again from stability.json.
"""

from collections.abc import Sequence
import logging

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("workdir")
_REPETITIONS = absl_flags.DEFINE_integer(
  "repetitions",
  128,
  "Number of independent data sets and trainings of each setting, a multiple of 4.",
  lower_bound=8,
)
_REPLACED = absl_flags.DEFINE_integer(
  "replaced",
  8,
  "Number of positives, and of negatives, that are replaced one at a time in each repetition.",
  lower_bound=1,
)
_ALGORITHMS = absl_flags.DEFINE_list(
  "algorithms", None, "Some of SOPRC, without_v, ap, through_t, self_weight. Default: all."
)
_SWEEPS = absl_flags.DEFINE_list(
  "sweeps", None, "Some of T, n+, n-, N+, N+(T=16), N-, N-(T=16), T=N+, beta, rate. Default: all."
)
_SEED = absl_flags.DEFINE_integer("seed", 0, "Seed of all draws.", lower_bound=0)

_SHORT = {
  "SOPRC": "SOPRC",
  "without_v": "SOPRC without v",
  "ap": "AP loss",
  "through_t": "SOPRC, gradient through T",
  "self_weight": "SOPRC, self weight 1/n+",
}


def main(argv: Sequence[str]) -> None:
  folder = flags.folder(argv, "--workdir=runs/stability", "stability.json")
  from experiments.stability import stability_plots, stability_report, stability_sweeps
  from soprc_jax.training import workdir

  log = logging.getLogger("soprc_jax.stability")
  with flags.errors_as_messages():
    effort = stability_sweeps.Effort(_REPETITIONS.value, _REPLACED.value, _SEED.value)
    sweeps = stability_sweeps.plan(
      _named("algorithms", _ALGORITHMS.value, _SHORT),
      _named(
        "sweeps",
        _SWEEPS.value,
        {quantity.replace(" ", ""): quantity for quantity in stability_sweeps.QUANTITIES},
      ),
    )
    settings = stability_sweeps.settings_of(sweeps)
    if not settings:
      raise ValueError(
        "none of --algorithms is measured in any of --sweeps: give more algorithms or sweeps"
      )
    results = stability_sweeps.run(folder / "stability.json", settings, effort, told=log.info)
    table = stability_report.markdown(sweeps, results, effort)
    workdir.write_atomically(folder / "table.md", table)
    names = stability_plots.plot_all(folder, sweeps, results)
  print(table)
  print(f"Written to {folder}: stability.json, table.md, {', '.join(names)}")


def _named(flag: str, given: Sequence[str] | None, known: dict[str, str]) -> list[str]:
  """Returns what the names of a flag stand for, all if the flag is not given."""
  names = list(known) if given is None else [name.replace(" ", "") for name in given]
  wrong = [name for name in names if name not in known]
  if wrong or not names:
    raise ValueError(
      f"--{flag} must be some of {', '.join(known)}; got {', '.join(wrong) or 'none'}"
    )
  return [known[name] for name in names]


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
