"""Runs `experiments.train` and writes its phase, so that a test can stop it in that phase.

The last line of ``$PHASES`` names the phase.

The run itself does not change: functions are wrapped to write a word when they begin.
"""

import functools
import os
import sys

from absl import app

from experiments import flags, train
from soprc_jax.training import build, checkpoints, checksums, evaluation, results, workdir

# Phase -> the function that begins it. The training steps run between them.
PHASES = {
  "starting": (build, "make_data"),
  "compiling": (checkpoints.Store, "restore_intact"),
  "evaluating": (evaluation, "evaluate"),
  "syncing": (workdir.MetricsLog, "sync"),
  "saving": (checkpoints.Store, "save"),
  "noting digests": (checksums, "write"),
  "testing": (results, "write"),
}


def _telling(function, word):
  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    _tell(word)
    found = function(*args, **kwargs)
    _tell("compiling" if word == "compiling" else f"after {word}")
    return found

  return wrapped


def _tell(word):
  with open(os.environ["PHASES"], "a") as file:
    file.write(word + "\n")


if __name__ == "__main__":
  for phase, (owner, name) in PHASES.items():
    setattr(owner, name, _telling(getattr(owner, name), phase))
  sys.argv[0] = train.__file__
  app.run(train.main, flags_parser=flags.parse)
