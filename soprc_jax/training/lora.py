"""Low-rank adapters (LoRA), as a reparametrization outside the model.

Hu et al., "LoRA: low-rank adaptation of large language models", 2021. The parameters of a run hold
the frozen kernels W of the model, and for each of them A ``[in, r]`` and B ``[r, out]`` under
``lora/``. The model itself gets W + alpha/r A B, so it needs no change. Checkpoints store these
merged kernels for all other uses.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.training import finetuning

# The trained parameters, see `finetuning.select`.
TRAINED = rf"^{finetuning.ADAPTERS}/.+/[ab]$|^head/"
_SCALE = f"{finetuning.ADAPTERS}/scale"


def add(params: Any, *, rank: int, alpha: float, targets: str, key: jax.Array) -> Any:
  """Adds adapters to the parameters of a model. The model stays the same, since B is 0.

  The scale alpha/r is a parameter too, which is not trained, so that the parameters alone determine
  the model.

  Args:
    params: parameters of the model.
    rank: r >= 1.
    alpha: > 0.
    targets: regular expression that is searched in the paths of the 2-D kernels. The head has no
      adapter, since it is trained.
    key: random key of A, whose entries have the variance 1 / in.

  Raises:
    ValueError: the pattern matches no such kernel, or the rank exceeds a side of one.
  """
  flat = finetuning.flat(params)
  kernels = {
    path: leaf.shape
    for path, leaf in flat.items()
    if path.endswith("/kernel") and leaf.ndim == 2 and not path.startswith("head/")
  }
  chosen = {path: shape for path, shape in kernels.items() if re.search(targets, path)}
  if not chosen:
    raise ValueError(
      f"model.lora.targets={targets!r} matches no kernel of a dense layer besides the head; there "
      f"are {finetuning.examples(kernels)}. Convolutions have no adapters: use optim.train_only"
    )
  narrow = {path: shape for path, shape in chosen.items() if rank > min(shape)}
  for path, shape in narrow.items():
    raise ValueError(
      f"model.lora.rank={rank} exceeds a side of {path} {list(shape)}: give at most {min(shape)}, "
      "or leave it out of model.lora.targets"
    )
  keys = jax.random.split(jax.random.fold_in(key, 1), len(chosen))
  for (path, (fan_in, width)), one in zip(chosen.items(), keys, strict=True):
    name = f"{finetuning.ADAPTERS}/{path}"
    flat[f"{name}/a"] = jax.random.normal(one, (fan_in, rank), jnp.float32) * fan_in**-0.5
    flat[f"{name}/b"] = jnp.zeros((rank, width), jnp.float32)
  flat[_SCALE] = jnp.float32(alpha / rank)
  return finetuning.nested(flat)


def base(params: Any) -> Any:
  """Returns the parameters without the adapters, in the structure of the model."""
  return {name: node for name, node in params.items() if name != finetuning.ADAPTERS}


def merge(params: Any) -> Any:
  """Returns the parameters of the model: W + alpha/r A B for each kernel with an adapter.

  Differentiable. Parameters without adapters are returned as they are.
  """
  if finetuning.ADAPTERS not in params:
    return params
  flat = finetuning.flat(params)
  for path in [path for path in flat if path.startswith(f"{finetuning.ADAPTERS}/")]:
    name, _, part = path.rpartition("/")
    if part == "a":
      kernel = name.removeprefix(f"{finetuning.ADAPTERS}/")
      product = jnp.matmul(flat[path], flat[f"{name}/b"], precision=jax.lax.Precision.HIGHEST)
      flat[kernel] = flat[kernel] + flat[_SCALE] * product
  return base(finetuning.nested(flat))


def merged(params: Any) -> Any:
  """Computes `merge` on this host, as numpy arrays; the same bits for every use of a model."""
  if finetuning.ADAPTERS not in params:
    return params
  return jax.tree.map(np.asarray, jax.jit(merge)(params))
