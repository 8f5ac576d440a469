"""Reads the reference values of the authors' code and compares ours with them.

The values are described in goldens/README.md.
"""

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np

GOLDENS = pathlib.Path(__file__).parent / "goldens"


@functools.cache
def archive(name):
  """Returns all arrays of one file by key; reads it once."""
  with np.load(GOLDENS / f"{name}.npz") as file:
    return {key: file[key] for key in file.files}


def num_cases(name):
  return int(archive(name)["num_cases"])


def num_steps(name, case):
  return int(archive(name)[f"case{case}/num_steps"])


def arrays(name, case, step=None):
  """Returns the arrays under ``case<i>/`` (and ``step<t>/``). Adds the embeddings that a shared
  batch omits.
  """
  prefix = f"case{case}/" + ("" if step is None else f"step{step}/")
  found = {
    key[len(prefix) :]: array for key, array in archive(name).items() if key.startswith(prefix)
  }
  found.setdefault("emb", archive("batch_large")["emb"])
  return found


def info(name, case):
  return json.loads(str(archive(name)[f"case{case}/info"]))


def hparams(name, case):
  return info(name, case)["hparams"]


def assert_matches(golden, value, gradient, dtype, prefix="", *, radial=True):
  """Compares loss and gradient with the float64 reference, on the rows where that one is stable.
  ``radial=False`` excludes the gradient along the embeddings themselves, which a normalization
  removes.
  """
  suffix, value_tol, gradient_tol = (
    ("_f32", 1e-4, 1e-4) if dtype == jnp.float32 else ("", 1e-9, 1e-7)
  )
  loss, expected = (
    golden[prefix + "loss64"],
    golden[prefix + "grad64"] * float(golden.get("true_scale", 1.0)),
  )
  if golden["loss_stable" + suffix]:
    np.testing.assert_allclose(
      value, loss, rtol=0, atol=value_tol * max(1.0, abs(float(loss)))
    )  # contrastive sums: up to 500
  assert np.isfinite(gradient).all()
  embeddings = golden["emb"].astype(np.float64)
  atol = gradient_tol * max(np.abs(expected).max(), 1e-12)
  raw, stable = golden["grad_stable" + suffix], golden["tan_stable" + suffix]
  if radial:
    np.testing.assert_allclose(gradient[raw], expected[raw], rtol=0, atol=atol)
  got, expected = tangential(gradient, embeddings), tangential(expected, embeddings)
  np.testing.assert_allclose(got[stable], expected[stable], rtol=0, atol=atol)


def tangential(gradient, embeddings):
  """Returns the part of a gradient that changes directions. This is what a normalization leaves of
  it.
  """
  return gradient - np.sum(gradient * embeddings, axis=1, keepdims=True) * embeddings
