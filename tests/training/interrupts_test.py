"""Tests SIGTERM and Ctrl-C during the steps.

The first is noted, a second one stops the process at once.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import runs

from experiments import flags
from soprc_jax.training import interrupts


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts():
  """Enables Ctrl-C, as in a terminal. A shell makes background commands ignore it, including the
  tests run by such a command.
  """
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_a_signal_is_noted_until_the_step_is_done(number, capfd):
  before = signal.getsignal(number)
  with interrupts.Requests() as requests:
    assert not requests.due(1)
    os.kill(os.getpid(), number)
    assert requests.due(2)
    assert requests.number == number
  assert signal.getsignal(number) is before
  assert "stopping after this step" in capfd.readouterr().err


def _terminate_and_wait():
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(10)


def test_f57_a_signal_is_noted_where_nobody_reads_the_output(monkeypatch):
  def broken(*_):
    raise BrokenPipeError

  with interrupts.Requests() as requests:
    monkeypatch.setattr(os, "write", broken)
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.undo()
  assert requests.number == signal.SIGTERM


def test_work_that_can_be_done_again_is_cut_short(capfd):
  with interrupts.Requests() as requests:
    with pytest.raises(interrupts.CutShort), requests.may_cut():
      _terminate_and_wait()
    assert requests.due(1)
    with pytest.raises(interrupts.CutShort), requests.may_cut():
      raise AssertionError("it begins no more")
  assert "the evaluation is postponed" in capfd.readouterr().err


def test_nothing_is_cut_where_signals_are_not_taken():
  """Checks the case of several processes, where jax reports that one of them is to stop."""
  requests = interrupts.Requests()
  requests.number = signal.SIGTERM
  with requests.may_cut():
    pass


def test_a_signal_that_the_process_ignores_stays_ignored():
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background command
  try:
    with interrupts.Requests() as requests:
      os.kill(os.getpid(), signal.SIGINT)
      assert not requests.due(1)
  finally:
    signal.signal(signal.SIGINT, before)


_TWICE = """
import os, signal, time
from soprc_jax.training import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupts.Requests():
  for _ in range(2):
    os.kill(os.getpid(), signal.{name})
  time.sleep(60)
"""


@pytest.mark.parametrize(
  ("name", "status"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", -signal.SIGINT)]
)
def test_the_second_stops_at_once(name, status):
  done = subprocess.run(
    [sys.executable, "-c", _TWICE.format(name=name)], cwd=runs.ROOT, capture_output=True, timeout=50
  )
  assert done.returncode in (status, 1)  # Python shows its own traceback for Ctrl-C
  assert b"stopping after this step" in done.stderr


@pytest.mark.parametrize(
  ("error", "status"),
  [
    (interrupts.InterruptedRunError(15, "stopped"), 143),
    (interrupts.InterruptedRunError(2, "stopped"), 130),
    (KeyboardInterrupt(), 130),
  ],
)
def test_exit_status(error, status, capsys):
  with pytest.raises(SystemExit) as left, flags.errors_as_messages():
    raise error
  assert left.value.code == status
  assert capsys.readouterr().err.lower().startswith(("stopped", "interrupted"))
