"""Tests the progress lines of a run: speed, waiting time for images, and remaining time."""

import logging
import time

import runs

from soprc_jax.training import progress, workdir


def test_share_of_all_steps():
  lines = [{"data_wait": 0.1, "seconds": 0.4}, {"data_wait": 0.0, "seconds": 0.6}]
  assert workdir.data_wait_share(lines) == 0.1
  assert workdir.data_wait_share([]) == 0.0


class _Clock:
  """Provides a clock that only moves when the test sets it."""

  def __init__(self, monkeypatch):
    self.now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)


def _show(caplog, monkeypatch, lines, *, num_steps, start=0, **values):
  """Returns the messages of a run whose steps take a second each, the first one 50."""
  clock = _Clock(monkeypatch)
  monkeypatch.setattr(progress, "on_terminal", lambda config: False)
  monkeypatch.setattr(logging.getLogger("soprc_jax"), "propagate", True)
  with caplog.at_level(logging.INFO, logger="soprc_jax"):
    shown = progress.Progress(runs.tiny_config(**values), start, num_steps)
    for line in lines:
      clock.now += line["seconds"]
      shown.show({"loss": 0.25} | line)
  return caplog.messages


def _line(step, seconds=1.0, wait=0.0, **values):
  return {"step": step, "seconds": seconds, "data_wait": wait} | values


def test_a_line_tells_rate_wait_loss_val_and_time_left(caplog, monkeypatch):
  lines = [_line(1, 50.0), _line(2), _line(3, wait=0.5), _line(4, wait=0.25, val_mAUPRC=0.5)]
  (message,) = _show(caplog, monkeypatch, lines, num_steps=104)
  assert message == "step 4/104: loss 0.25, val_mAUPRC 0.5, 16 images/s, data wait 1%, 2 min left"


def test_vectors_are_no_images(caplog, monkeypatch):
  monkeypatch.setattr(progress.datasets, "unit", lambda data: "vectors")
  (message,) = _show(caplog, monkeypatch, [_line(1), _line(2)], num_steps=2)
  assert message == "step 2/2: loss 0.25, 16 vectors/s, data wait 0%"


def test_a_line_is_of_the_steps_since_the_last_one(caplog, monkeypatch):
  lines = [_line(step, wait=0.5 * (step <= 2)) for step in range(1, 5)]
  first, second = _show(caplog, monkeypatch, lines, num_steps=4, **{"log.line_every": 2})
  assert "data wait 50%, 2 s left" in first
  assert second == "step 4/4: loss 0.25, 16 images/s, data wait 0%"


def test_the_time_to_the_result_is_announced_after_the_first_steps(caplog, monkeypatch):
  monkeypatch.setattr(progress.time, "time", lambda: 0.0)
  lines = [_line(step, 50.0 if step == 41 else 1.0) for step in range(41, 60)]
  message, _ = _show(
    caplog, monkeypatch, lines, num_steps=106, start=40
  )  # the second one is the line of step 50
  at = time.strftime("%H:%M", time.localtime(60.0))
  assert message == (
    f"16 images/s: the last step in about 60 s, at {at}; evaluations take additional time."
  )


def test_a_bar_has_the_same(monkeypatch):
  monkeypatch.setattr(progress, "on_terminal", lambda config: True)
  found = []

  class Bar:
    def set_postfix(self, values, refresh):
      found.append(values)

    def update(self):
      found.append("step")

    def write(self, message, file):
      found.append(message)

  monkeypatch.setattr(progress, "tqdm", lambda **options: Bar())
  shown = progress.Progress(runs.tiny_config(), 0, 10)
  for step in range(1, 7):
    shown.show(_line(step, 2.0, wait=1.0, loss=0.25))
  assert found[0] == {"loss": "0.25", "images/s": "8", "data wait": "50%"}
  assert found.count("step") == 6
  assert sum("8 images/s: the last step in about" in str(entry) for entry in found) == 1


def test_an_annealed_prior_is_shown_and_explained_once(caplog, monkeypatch):
  lines = [_line(1, 50.0), *(_line(step, prior=0.5 / step) for step in range(2, 5))]
  messages = _show(
    caplog, monkeypatch, lines, num_steps=4, **{"log.line_every": 2, "loss.prior.start": 0.5}
  )
  why = "The prior falls from 0.5: the loss may rise while the ranking improves. Watch val_mAUPRC."
  assert messages[0] == why
  assert [message for message in messages if message == why] == [why]
  assert messages[-1].startswith("step 4/4: loss 0.25, prior 0.125, 16 images/s")
