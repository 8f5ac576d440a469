"""Runs LibAUC's APLoss or mAPLoss with its optimizer SOAP on the same task, in another interpreter.

LibAUC is never a dependency, and never imported here.
"""

from pathlib import Path
import subprocess
import tempfile
from typing import Any

import numpy as np

from experiments.binary import binary

SCRIPT = Path(__file__).with_name("libauc_peer.py")
_VERSIONS = (
  "import libauc, libauc.losses.auc, libauc.optimizers, sys, torch; print('libauc', "
  "libauc.__version__, 'torch', torch.__version__, 'Python', sys.version.split()[0])"
)
_REMEDY = (
  "give the python of a separate virtual environment with libauc:\n"
  "  python -m venv libauc_venv && libauc_venv/bin/pip install torch numpy scipy scikit-learn "
  "pandas tqdm && libauc_venv/bin/pip install --no-deps libauc"
)


def versions(python: str) -> str:
  """Returns the versions of libauc, torch and Python in the interpreter.

  Raises:
    ValueError: the interpreter does not run, or cannot import libauc.
  """
  if not SCRIPT.is_file():
    raise ValueError(
      f"{SCRIPT} is missing: --libauc_python needs the repository, not the installed package alone"
    )
  try:
    done = subprocess.run(
      [python, "-c", _VERSIONS],
      capture_output=True,
      encoding="utf-8",
      errors="replace",
      check=False,
    )
  except OSError as error:
    raise ValueError(
      f"--libauc_python={python} cannot be started ({error.strerror}): {_REMEDY}"
    ) from None
  if done.returncode or not done.stdout.startswith("libauc"):
    raise ValueError(
      f"--libauc_python={python} cannot import libauc ({_last_line(done.stderr)}): {_REMEDY}"
    )
  return done.stdout.strip()


def train(config: Any, task: binary.Task, python: str) -> tuple[binary.Found, float]:
  """Trains like a trainer of `binary.make_trainer`; also returns the median seconds of a step.

  Raises:
    ChildProcessError: the script failed.
  """
  with tempfile.TemporaryDirectory(prefix="soprc_jax_peer_") as folder:
    given, gotten = Path(folder) / "task.npz", Path(folder) / "found.npz"
    arrays: dict[str, Any] = _task_arrays(config, task)
    np.savez(given, **arrays)
    done = subprocess.run(
      [python, str(SCRIPT), str(given), str(gotten)],
      capture_output=True,
      encoding="utf-8",
      errors="replace",
      check=False,
    )
    if done.returncode or not gotten.exists():
      raise ChildProcessError(f"{python} {SCRIPT} failed: {_last_line(done.stderr)}")
    with np.load(gotten, allow_pickle=False) as found:
      return _judged(found, task), float(found["step_seconds"])


def first_steps(
  config: Any, task: binary.Task, rate: float, *, steps: int
) -> tuple[Any, binary.Task]:
  """Returns config and task of a run at one learning rate that ends after ``steps`` steps.

  It is for timing.
  """
  config = config.copy_and_resolve_references()
  batches = task.batches.reshape(-1, task.batches.shape[-1])[:steps]
  with config.unlocked():
    config.rates = (rate,)
    config.train.steps = len(batches)
  return config, task._replace(batches=batches[None])


def _task_arrays(config: Any, task: binary.Task) -> dict[str, np.ndarray]:
  options, optim = config.loss.libauc, config.optim
  layers = task.params["params"]
  arrays = {
    "rates": np.array(config.rates),
    "factors": binary.rate_factors(config),
    "batches": task.batches.astype(np.int64),
    "train_labels": task.splits.train.labels,
    "gamma": np.array(options.gamma),
    "margin": np.array(options.margin),
    "mode": np.array(optim.name),
    "momentum": np.array(optim.momentum),
    "weight_decay": np.array(optim.weight_decay),
  }
  for name in ("train", "val", "test"):
    arrays[f"{name}_features"] = getattr(task.splits, name).features
  for i in range(len(layers)):
    arrays |= {f"{kind}{i}": np.asarray(layers[f"Dense_{i}"][kind]) for kind in ("kernel", "bias")}
  return arrays


def _judged(found: Any, task: binary.Task) -> binary.Found:
  """Returns the results of the best model on the validation split, measured as for all methods."""
  val = np.array(
    [
      [float(binary.auprc(logits, task.splits.val.labels)) for logits in run]
      for run in found["val"]
    ]
  )
  at = np.nan_to_num(val, nan=-1).argmax(axis=1)
  best = val[np.arange(len(val)), at]
  return binary.Found(val, found["losses"], found["test"][np.arange(len(val)), at], best)


def _last_line(text: str) -> str:
  return (text.strip().splitlines() or ["no message"])[-1]
