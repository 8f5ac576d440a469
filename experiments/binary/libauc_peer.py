"""Trains with LibAUC's APLoss, of several labels mAPLoss, and SOAP on given batches.

This is a script for a separate interpreter with numpy, torch and libauc.

PYTHON experiments/binary/libauc_peer.py TASK.npz FOUND.npz

`soprc train-binary --libauc_python=PYTHON` writes TASK.npz, calls this and reads FOUND.npz
(experiments/binary/binary_peer.py). Nothing here imports JAX or soprc_jax, and nothing of soprc_jax
imports torch or libauc.
"""

import sys
import time
from typing import Any

from libauc.losses.auc import APLoss, mAPLoss
from libauc.optimizers import SOAP
import numpy as np
import torch


def main(task_path: str, found_path: str) -> None:
  # Models as small as these are slower on two threads than on one.
  torch.set_num_threads(1)
  with np.load(task_path, allow_pickle=False) as task:
    found = [train(task, float(rate)) for rate in task["rates"]]
  val, test, losses, seconds = zip(*found)
  np.savez(
    found_path,
    val=np.stack(val),
    test=np.stack(test),
    losses=np.stack(losses),
    step_seconds=np.median(seconds),
  )


def train(task: Any, rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
  """Trains one run.

  Returns logits of val and test, ``[E, n]`` or ``[E, n, K]``, at each evaluation, mean losses
  ``[E]``, and the median seconds of a step.
  """
  features, labels = (
    torch.from_numpy(task["train_features"]),
    torch.from_numpy(task["train_labels"]).float(),
  )
  network = make_network(task)
  loss_of = make_loss(task)
  optimizer = SOAP(
    network.parameters(),
    lr=rate,
    mode=str(task["mode"]),
    momentum=float(task["momentum"]),
    weight_decay=float(task["weight_decay"]),
    dampening=0.0,
    verbose=False,
    device=torch.device("cpu"),
  )
  factors, step, seconds, traces = task["factors"], 0, [], []
  for chunk in task["batches"]:
    losses = []
    for rows in chunk:
      began = time.perf_counter()
      optimizer.param_groups[0]["lr"] = rate * float(factors[step])
      step += 1
      x, y = features[rows], labels[rows]
      if y.any():  # the losses raise for a batch without a positive
        # LibAUC's tutorials give probabilities; the margin is in their units.
        loss = loss_of(torch.sigmoid(network(x)), y, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
      seconds.append(time.perf_counter() - began)
    with torch.no_grad():
      logits = [
        network(torch.from_numpy(task[f"{part}_features"])).numpy() for part in ("val", "test")
      ]
      if labels.ndim == 1:
        logits = [values[:, 0] for values in logits]
    traces.append((*logits, np.float32(np.mean(losses) if losses else np.nan)))
  val, test, mean_losses = zip(*traces)
  return np.stack(val), np.stack(test), np.stack(mean_losses), float(np.median(seconds))


def make_loss(task: Any) -> Any:
  """Returns the loss as a function of probabilities, labels and rows of a batch."""
  labels = task["train_labels"]
  options = {
    "gamma": float(task["gamma"]),
    "margin": float(task["margin"]),
    "device": torch.device("cpu"),
  }
  if labels.ndim > 1:
    many = mAPLoss(data_len=len(labels), num_labels=labels.shape[1], **options)

    def of_labels(probabilities: Any, y: Any, rows: Any) -> Any:
      # mAPLoss raises for a label without a positive, so those are left out.
      return many(probabilities, y, torch.from_numpy(rows), torch.nonzero(y.any(dim=0))[:, 0])

    return of_labels
  # APLoss keeps two averages for each positive, indexed by its number among the positives.
  positives = np.flatnonzero(labels)
  numbers = np.zeros(len(labels), np.int64)
  numbers[positives] = np.arange(len(positives))
  one = APLoss(data_len=len(positives), **options)
  return lambda probabilities, y, rows: one(probabilities, y, torch.from_numpy(numbers[rows]))


def make_network(task: Any) -> torch.nn.Sequential:
  """Returns the MLP with the given weights: ``kernel0 [in, out]``, ``bias0 [out]`` and so on."""
  count = sum(name.startswith("kernel") for name in task.files)
  layers: list[torch.nn.Module] = []
  for i in range(count):
    kernel, bias = (
      torch.from_numpy(task[f"kernel{i}"].copy()),
      torch.from_numpy(task[f"bias{i}"].copy()),
    )
    layer = torch.nn.Linear(*kernel.shape)
    with torch.no_grad():
      layer.weight.copy_(kernel.T)
      layer.bias.copy_(bias)
    layers += [layer, torch.nn.ReLU()]
  return torch.nn.Sequential(*layers[:-1])


if __name__ == "__main__":
  main(*sys.argv[1:])
