"""The end of a run: test metrics, plots, ``results.json``."""

from collections.abc import Mapping
import importlib.metadata
from pathlib import Path
import platform
import subprocess
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from soprc_jax import version
from soprc_jax.data import sources
from soprc_jax.metrics import curves, per_query
from soprc_jax.models import convolutions
from soprc_jax.training import evaluation, lora, parallel, plots
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.step import TrainState


def write(
  workdir: Path,
  config: ConfigDict,
  splits: dict[str, sources.Source],
  embed: evaluation.EmbedFn,
  state: TrainState,
  lines: list[dict[str, Any]],
  *,
  notes: Mapping[str, Any],
) -> dict[str, Any]:
  """Tests a model on every test split, and writes ``results.json``, plots and ``per_query.npz``.

  Args:
    workdir: folder of the run.
    config: resolved.
    splits: splits of the data.
    embed: function of `evaluation.make_embed`.
    state: state of the tested model; numpy leaves.
    lines: lines of ``metrics.jsonl``.
    notes: further entries, left out where they are None: ``"baselines"``, see
      `trivial_baselines.measure`; ``"seen_classes"``, the validation and test classes that the
      model was trained on, see `classes.seen`; ``"command"``, see `loop.train`; ``"chosen"``, see
      `workdir.chosen`.

  Returns:
    The content of ``results.json``.

  Raises:
    DivergedError: an embedding is not finite.
  """
  replicated = parallel.replicate(
    {"params": lora.merged(state.params), "batch_stats": state.batch_stats}
  )
  values: dict[str, Any] = {}
  for name in (name for name in splits if name.startswith("test")):
    embedded = embed(replicated, splits[name])
    values[name], queries = evaluation.test(embedded, splits[name], config)
    if parallel.is_main():
      per_query.write(workdir / workdir_lib.per_query(name), queries)
    if config.eval.one_per_class:
      values[f"{name}_one_per_class"] = evaluation.one_per_class(embedded, config)
    if name == "test" and parallel.is_main():
      _draw(workdir, config, embedded, lines)
  found = {
    "config": config.to_dict(),
    "steps": config.warmup.steps + config.train.steps,
    "tested_step": int(state.step),
    "images_per_second": _images_per_second(config, lines),
    "data_wait_share": workdir_lib.data_wait_share(lines),
    "device": parallel.describe(),
    "versions": software(),
    "convolutions": convolutions.implementation(config.model.dtype),
    "val": _val_at(lines, int(state.step)),
    **values,
  }
  found |= {name: value for name, value in notes.items() if value is not None}
  if parallel.is_main():
    workdir_lib.write_results(workdir, found)
  parallel.wait_for_all("the results are written")
  return found


def _draw(
  workdir: Path, config: ConfigDict, embedded: evaluation.Embedded, lines: list[dict[str, Any]]
) -> None:
  """Plots the run, and saves the data of its mean precision-recall curve on the test split."""
  everyone = np.arange(len(embedded.labels))
  precision, recall, thresholds = curves.mean_pr_curve(
    embedded.embeddings,
    **embedded.relevance(everyone, everyone),
    thresholds=curves.fine_grid(),
    block_size=config.eval.block_size,
  )
  np.savez(
    workdir / workdir_lib.PR_CURVE, precision=precision, recall=recall, thresholds=thresholds
  )
  plots.plot_pr_curve(
    workdir / "pr_curve.png", precision, recall, title="Mean precision-recall curve, test"
  )
  plots.plot_convergence(workdir / "convergence.png", lines, warmup_steps=config.warmup.steps)


def _images_per_second(config: ConfigDict, lines: list[dict[str, Any]]) -> float:
  """Returns images per second of the median step, including steps before the run was resumed."""
  seconds = [line["seconds"] for line in lines]
  median = float(np.median(seconds)) if seconds else 0.0
  return round(config.train.batch_size / median, 1) if median else 0.0


def _val_at(lines: list[dict[str, Any]], step: int) -> dict[str, Any]:
  line = next((line for line in lines if line["step"] == step), {})
  return {name.removeprefix("val_"): line[name] for name in line if name.startswith("val_")}


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "pillow")


def software() -> dict[str, str]:
  """Returns name -> version of Python, soprc_jax and the packages that affect numeric results.

  If the package is in a git repository, ``"commit"`` is included.
  """
  versions = {"python": platform.python_version(), "soprc_jax": version.__version__}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  commit = _commit()
  return versions | ({"commit": commit} if commit else {})


def _commit() -> str:
  """Returns the commit of this package's repository, and whether files have changed since.

  It is empty if there is no repository or no git.
  """
  root = Path(__file__).parents[2]
  if not (root / ".git").exists():
    return ""
  try:
    head, changes = (
      subprocess.run(
        ["git", *command],
        cwd=root,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=10,
        check=True,
      ).stdout.strip()
      for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
  except (OSError, subprocess.SubprocessError):
    return ""
  return head + (" with changes" if changes else "")
