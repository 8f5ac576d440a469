"""Command ``soprc``: ``soprc NAME ...`` runs the same program as ``python -m experiments.NAME``."""

import ast
from collections.abc import Sequence
import difflib
import importlib.util
import os
from pathlib import Path
import re
import runpy
import sys

# Modules of experiments/ that are not programs, and the package behind train_binary.
_NO_PROGRAMS = ("binary", "flags", "gallery", "malloc")
_PACKAGE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the named program, with the rest of the command line as its flags.

  Args:
    argv: command line; None takes that of the process.

  Returns:
    The exit status, if no program was run.
  """
  argv = list(sys.argv if argv is None else argv)
  root = _root()
  there = _programs(root / "experiments")
  name = argv[1] if len(argv) > 1 else "--help"
  if name in ("--help", "-h", "help", "--helpfull"):
    return _print(_overview(there))
  if name == "--version":
    from soprc_jax import version

    return _print(f"soprc_jax {version.__version__}")
  if _key(name) not in there:
    close = difflib.get_close_matches(_key(name), there, n=1)
    hint = f" Did you mean {_shown(close[0])!r}?" if close else ""
    print(f"Error: soprc has no command {name!r}.{hint}\nTry soprc --help.", file=sys.stderr)
    return 1
  if importlib.util.find_spec("absl") is None:
    print('Error: the commands need more packages: pip install "soprc_jax[train]"', file=sys.stderr)
    return 1
  # Programs, and the processes that they start, import experiments and configs from the top level.
  sys.path.insert(0, str(root))
  os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(root), os.environ.get("PYTHONPATH")])
  )
  sys.argv = [f"soprc {name}", *argv[2:]]
  runpy.run_module(f"experiments.{_key(name)}", run_name="__main__", alter_sys=True)
  return 0


def _print(text: str) -> int:
  """Prints a text and returns the exit status: 1 if it cannot be written, but a closed pager is no
  error.
  """
  try:
    print(text, flush=True)
  except OSError as error:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
      print(f"Error: the output cannot be written ({error.strerror})", file=sys.stderr)
      return 1
  return 0


def _root() -> Path:
  """Returns the folder that contains ``experiments`` and ``configs``.

  It is inside the package if that was installed from a wheel, otherwise it is the checkout.
  """
  installed = _PACKAGE / "programs"
  return installed if installed.is_dir() else _PACKAGE.parent


def _programs(folder: Path) -> dict[str, Path]:
  """Returns the programs of a folder by module name."""
  found = {path.stem: path for path in folder.glob("[!_]*.py")}
  found |= {path.parent.name: path for path in folder.glob("[!_]*/__main__.py")}
  return {name: path for name, path in sorted(found.items()) if name not in _NO_PROGRAMS}


def _overview(there: dict[str, Path]) -> str:
  """Returns the help text with one line a command, without importing the programs."""
  width = max(map(len, there))
  lines = [f"  {_shown(name):{width}}  {_summary(path)}" for name, path in there.items()]
  return "\n".join(
    [
      "Train, evaluate and use models for average precision.",
      "",
      "usage: soprc COMMAND [--FLAG=VALUE ...]",
      "",
      "commands:",
      *lines,
      "",
      "soprc COMMAND --help explains a command. Example with the embedded data set:",
      "  soprc train --config=glyphs --workdir=runs/glyphs",
      "Example with your images, one subfolder per class:",
      "  soprc train --config=folder:small --config.data.root=IMAGES --workdir=runs/mine",
    ]
  )


def _summary(path: Path) -> str:
  """What stands before the first stop of a program's docstring."""
  docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
  return re.split(r"[.:;](?: |$)", " ".join(docstring.split()))[0]


def _key(name: str) -> str:
  return name.replace("-", "_")


def _shown(name: str) -> str:
  return name.replace("_", "-")


if __name__ == "__main__":
  sys.exit(main())
