"""The software that a run is made with, for those who want to make it again."""

import importlib.metadata
from pathlib import Path
import platform
import subprocess

from soprc_jax import version

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "pillow")


def found() -> dict[str, str]:
  """Name -> version, of Python, soprc_jax and the packages that decide numbers; ``"commit"`` where the package lies in a git repository."""
  versions = {"python": platform.python_version(), "soprc_jax": version.__version__}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  commit = _commit()
  return versions | ({"commit": commit} if commit else {})


def _commit() -> str:
  """The commit of the repository of this package, and whether files of it have changed since; empty if there is none or no git."""
  root = Path(__file__).parents[2]
  if not (root / ".git").exists():
    return ""
  try:
    head, changes = (
      subprocess.run(
        ["git", *command], cwd=root, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
      ).stdout.strip()
      for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
  except (OSError, subprocess.SubprocessError):
    return ""
  return head + (" with changes" if changes else "")
