"""Tests that pages of freed memory stay with the process (experiments/malloc.py)."""

import subprocess
import sys

import pytest
import runs

# Counts the page faults of an array in memory that another one of the same size has just freed.
_PROGRAM = """
import json, resource, sys
import numpy as np
from experiments import malloc
kept = malloc.keep_pages() if "keep" in sys.argv else False
np.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**24)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print("value of the test: " + json.dumps([kept, faults]))
"""


def _faults(*arguments, **env):
  program = [sys.executable, "-c", _PROGRAM, *arguments]
  done = subprocess.run(
    program, env=runs.environment(**env), capture_output=True, text=True, check=True
  )
  return runs.value(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_pages_are_used_again():
  without, with_ = _faults(), _faults("keep")
  assert with_[0]
  assert with_[1] < 0.2 * without[1]


def test_settings_of_the_user_stay():
  assert not _faults("keep", MALLOC_ARENA_MAX="2")[0]
