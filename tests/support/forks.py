"""Runs programs in forks of a process that has imported their libraries; see `runs.call`.

Each line of standard input is a request: the JSON of module, flags, working directory, and the
files of standard output and standard error. The answer is a line with the exit status.
"""

import gc
import json
import os
import runpy
import signal
import sys

# Most programs need it. The programs themselves, and their flags, are imported in the forks.
import soprc_jax.training.loop  # noqa: F401

gc.freeze()  # else a fork copies the memory of all libraries as it collects garbage
while request := sys.stdin.readline():
  child = os.fork()
  if child == 0:
    break
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
  sys.exit()

# The program runs outside the loop, so that a fork ends as any process does.
module, flags, folder, *files = json.loads(request)
signal.alarm(900)
os.chdir(folder)
for number, path in enumerate([os.devnull, *files]):
  os.dup2(os.open(path, os.O_RDWR), number)
sys.path[0] = folder
sys.argv = [module, *flags]
runpy.run_module(module, run_name="__main__", alter_sys=True)
