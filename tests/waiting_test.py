"""How long a run waits for its images: in results.json and in the lines of its progress."""

import logging

import pytest
import runs

from soprc_jax.training import progress, workdir


def test_share_of_all_steps():
  lines = [{"data_wait": 0.1, "seconds": 0.4}, {"data_wait": 0.0, "seconds": 0.6}]
  assert workdir.data_wait_share(lines) == 0.1
  assert workdir.data_wait_share([]) == 0.0


@pytest.mark.parametrize(("wait", "said"), [(0.01, ""), (0.25, "25% of the time waiting for data")])
def test_progress_tells_it_where_it_matters(caplog, monkeypatch, wait, said):
  config = runs.tiny_config()
  monkeypatch.setattr(progress, "on_terminal", lambda config: False)
  monkeypatch.setattr(logging.getLogger("soprc_jax"), "propagate", True)
  with caplog.at_level(logging.INFO, logger="soprc_jax"):
    shown = progress.Progress(config, 0, 2)
    # The first line is of the steps before it alone.
    shown.show({"step": 1, "loss": 1.0, "data_wait": wait, "seconds": 1.0, "val_mAUPRC": 0.5})
    shown.show({"step": 2, "loss": 1.0, "data_wait": 0.0, "seconds": 1.0})
  first, second = caplog.messages
  assert (said in first) if said else ("waiting" not in first)
  assert "waiting" not in second
