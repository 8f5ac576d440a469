"""What a step that was not finite looks like when it is made again."""

from collections.abc import Collection
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from soprc_jax._internal import text_table
from soprc_jax._internal.strings import printable
from soprc_jax.training import build, nonfinite, parallel, reproduction

_SHOWN = 8


def describe(workdir: Path, step: int | None = None, *, trusted: Collection[str] = ()) -> str:
  """Makes a kept step again and tells what was finite: the state before it, the embeddings, the gradient, the state that the loss carries.

  Args:
    workdir: of a run that has kept one.
    step: which; None for the last.
    trusted: see `reproduction.load`.

  Raises:
    ValueError: as `reproduction.load`.
  """
  found = reproduction.load(workdir, step, trusted=trusted)
  _, scalars = reproduction.run(found)
  parts = nonfinite.names(scalars["nonfinite"])
  gradient, carried = _broken_state(found)
  report = found.report
  lines = [
    f"Step {report['step']} of {workdir}, on {parallel.describe()} (then: {report.get('device', '?')}).",
    f"then: not finite: {', '.join(report.get('nonfinite', []))}; loss {report.get('loss')}, gradient norm {report.get('grad_norm')}",
    f"now:  {'not finite: ' + ', '.join(parts) if parts else 'finite'}; loss {scalars['loss']:g}, gradient norm {scalars['grad_norm']:g}",
    f"learning rate {report.get('learning_rate')}",
    "",
    *_table("state before the step", found.state),
    "",
    *_embeddings(found),
    "",
    *_table("gradient", gradient),
    "",
    *_table("carried state of the loss after the step", carried),
  ]
  if not parts:
    lines += ["", "It is finite here: the devices, or the versions of jax and XLA, are not those of then."]
  return "\n".join(lines)


def _table(title: str, tree: Any) -> list[str]:
  rows = [
    (f"  {name}", f"largest {size:.3g}" + (f", {bad} not finite" if bad else ""))
    for name, size, bad in reproduction.largest(tree, _SHOWN)
  ]
  return [f"{title}: arrays with numbers that are not finite, else the largest", *text_table.aligned(rows)]


def _embeddings(found: reproduction.Found) -> list[str]:
  """The images whose embeddings are not finite."""
  variables = {"params": found.state.params, "batch_stats": found.state.batch_stats}
  embeddings = np.asarray(jax.jit(found.parts.model.apply)(variables, found.batch["image"]))
  bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
  lines = [f"embeddings (by the running statistics): {len(bad)} of {len(embeddings)} images have some that are not finite"]
  return lines + [f"  {printable(found.ids[position])}" for position in bad[:_SHOWN]]


def _broken_state(found: reproduction.Found) -> tuple[Any, Any]:
  """Gradient of the step by the parameters, and the state that the loss carries after it, unguarded."""
  counts = np.array(found.report["class_counts"])
  parts = build.make_parts(found.config, counts, optimizer=optax.trace(decay=0.0), on_nonfinite="keep")
  # A trace without decay holds the gradient itself.
  opt_state = (found.state.opt_state[0], jax.jit(parts.tx.init)(found.state.params)[1])
  after, _ = reproduction.run(found._replace(parts=parts, state=dataclasses.replace(found.state, opt_state=opt_state)))
  return after.opt_state[1].trace, after.opt_state[0]
