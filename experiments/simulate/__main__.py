r"""Simulates the errors of the estimators and of the interpolated scores.

It reproduces Fig. 1, Appendix B.2 and Props. 1 to 3 of the paper. It also simulates a memory of the
scores of all training images.

soprc simulate --workdir=runs/simulation

There are three distributions of scores (binormal, bibeta, offset uniform) and 100,000 scores with a
share pi = 0.1 of positives. Batches have other shares, with 500 repetitions. SOPRC's v (beta 0.1, M
= 100) has followed 100 batches. The time is about 3 minutes on two CPU cores.

WORKDIR receives simulation.json (means and standard deviations) and plots as PNG files: densities,
estimation errors with l_{0,1} and with the surrogates, interpolation errors, and v tracked by Eq.
10 compared with Prop. 1. A second call redraws the plots from simulation.json.
"""

from collections.abc import Sequence
import json
import logging
import time

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("workdir")
_REPETITIONS = absl_flags.DEFINE_integer(
  "repetitions",
  500,
  "Number of batches of each kind, and of draws of interpolated scores.",
  lower_bound=2,
)
_POPULATION = absl_flags.DEFINE_integer(
  "population", 100_000, "Number of scores in the data set.", lower_bound=1000
)
_BATCH_SIZES = absl_flags.DEFINE_list(
  "batch_sizes", ["100", "200", "500", "1000", "2000", "5000"], "Sizes of the batches."
)
_SEED = absl_flags.DEFINE_integer("seed", 0, "Seed of all draws.", lower_bound=0)


def main(argv: Sequence[str]) -> None:
  folder = flags.folder(argv, "--workdir=runs/simulation", "simulation.json")
  from experiments.simulate import simulation, simulation_plots
  from soprc_jax._internal import stored
  from soprc_jax.training import workdir

  log = logging.getLogger("soprc_jax.simulate")
  with flags.errors_as_messages():
    settings = _settings(simulation.Settings())
    path = folder / "simulation.json"
    noted = json.loads(json.dumps(settings._asdict()))
    if path.exists():
      content = stored.read_json(path, {"settings": dict})
      if content["settings"] != noted:
        raise ValueError(
          f"{path} has results of other settings, or of another version: choose another --workdir, "
          "or the same flags"
        )
      content = stored.read_json(path, {"settings": dict, "results": simulation.RESULTS})
      log.info("Using the results in %s.", path)
    else:
      began = time.perf_counter()
      folder.mkdir(parents=True, exist_ok=True)
      results = simulation.run(settings, told=log.info)
      content = {
        "settings": noted,
        "seconds": round(time.perf_counter() - began, 1),
        "results": results,
      }
      workdir.write_atomically(path, json.dumps(content, indent=1) + "\n")
    names = simulation_plots.plot_all(folder, content["results"], settings)
  print(_summary(content["results"], settings))
  print(f"Written to {folder}: simulation.json, {', '.join(names)}")


def _settings(defaults: "simulation.Settings") -> "simulation.Settings":  # type: ignore[name-defined]  # noqa: F821
  try:
    sizes = tuple(int(size) for size in _BATCH_SIZES.value)
  except ValueError as error:
    raise ValueError(f"--batch_sizes: {error}") from None
  least = round(1 / min(defaults.shares))  # with one positive at the smallest share
  if not sizes or min(sizes) < least or len(set(sizes)) < len(sizes):
    raise ValueError(
      f"--batch_sizes must be different numbers of at least {least}, got "
      f"{','.join(_BATCH_SIZES.value)}"
    )
  return defaults._replace(
    repetitions=_REPETITIONS.value,
    population=_POPULATION.value,
    batch_sizes=tuple(sorted(sizes)),
    seed=_SEED.value,
  )


def _summary(results: dict, settings: "simulation.Settings") -> str:  # type: ignore[name-defined,type-arg]  # noqa: F821
  """Returns the mean errors at the largest batch, one line per distribution."""
  largest = max(settings.batch_sizes)
  lines = [
    f"mean error (estimate minus risk, l01) at batch size {largest}, by the share of positives in "
    "the batch:"
  ]
  lines.append(f"{'':>10} {'':>13} " + " ".join(f"{share:>8g}" for share in settings.shares))
  for name in results:
    if isinstance(results[name], list):  # no distribution
      continue
    entries = [entry for entry in results[name]["estimation"] if entry["batch_size"] == largest]
    for estimator in entries[0]["zero_one"]:
      means = " ".join(f"{entry['zero_one'][estimator]['mean']:+8.4f}" for entry in entries)
      lines.append(f"{name:>10} {estimator:>13} {means}")
  lines += ["", "score memory, error of the risk and relative error of its gradient, mean (std):"]
  for entry in results["score_memory"]:
    case = f"{entry['link']}, prior {entry['prior']:g}, separation {entry['separation']:g}"
    found = [
      f"{name} {value['bias']:+.3f} ({value['std']:.3f}), "
      f"{value['gradient_bias']:+.2f} ({value['gradient_std']:.2f})"
      for name, value in entry.items()
      if isinstance(value, dict)
    ]
    lines.append(f"{case}: {'; '.join(found)}")
  return "\n".join(lines)


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
