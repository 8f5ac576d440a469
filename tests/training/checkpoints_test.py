"""The folder of a run: whose it is, its log across kills, checkpoints that come back as they were."""

import fnmatch
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from soprc_jax import score_ema, tracking
from soprc_jax.training import checkpoints, replay, v_history, workdir
from soprc_jax.training import config as config_lib
from soprc_jax.training.step import TrainState


def _state(step=3, width=2, tracker=True, optimizer=None):
  """A state with every kind of tree that occurs: NamedTuples, tuples, empty states, scalars, several dtypes."""
  params = {
    "backbone": {"conv1": {"kernel": np.full((3, 3, 3, width), 0.1, np.float32)}},
    "head": {"kernel": np.arange(width * 2, dtype=np.float32).reshape(width, 2) / 3, "bias": np.zeros(2, np.float32)},
  }
  parts = [score_ema(num_lists=5, num_points=4, beta=0.1)] if tracker else []
  tx = optax.chain(
    *parts, optax.chain(optax.add_decayed_weights(1e-4), optimizer or optax.scale_by_adam()), optax.identity()
  )
  opt_state = tx.init(params)
  rng = np.random.default_rng(step)

  def fill(leaf):
    """Other numbers in every leaf, shape and dtype kept."""
    if leaf.dtype == np.float32:
      return rng.standard_normal(leaf.shape).astype(np.float32)
    return np.asarray(leaf) + np.int32(step)

  opt_state = jax.tree.map(fill, opt_state)
  stats = {"backbone": {"bn1": {"bn": {"mean": np.ones(width, np.float32), "var": np.full(width, 1e-38, np.float32)}}}}
  return TrainState(step=np.int32(step), params=jax.tree.map(fill, params), batch_stats=stats, opt_state=opt_state)


def _assert_same(state, other):
  assert jax.tree.structure(state) == jax.tree.structure(other)
  for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
    assert np.asarray(one).dtype == np.asarray(two).dtype
    np.testing.assert_array_equal(one, two)


@pytest.fixture
def store(tmp_path):
  opened = checkpoints.Store(tmp_path / "store", keep=2)
  yield opened
  opened.close()


def _open(folder, **settings):
  return checkpoints.Store(folder, **settings)


class TestStore:
  def test_f18_round_trip(self, tmp_path, store):
    saved = _state()
    store.save(saved, {"labels": [[11318, 0], [-7, 1]]})
    state, meta = store.restore(_state(step=0))
    _assert_same(state, saved)
    assert meta == {"labels": [[11318, 0], [-7, 1]]}
    # NamedTuples come back as what they are: the tracker finds its own state.
    np.testing.assert_array_equal(tracking.find_state(state.opt_state).v, tracking.find_state(saved.opt_state).v)

  def test_another_process_finds_it(self, tmp_path, store):
    store.save(_state(), {})
    again = _open(tmp_path / "store", keep=2)
    assert again.latest_step() == 3
    _assert_same(again.restore(_state(step=0))[0], _state())
    again.close()

  def test_half_precision_leaves_keep_their_dtype(self, store):
    def narrow(state):
      return state.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))

    store.save(narrow(_state()), {})
    _assert_same(store.restore(narrow(_state(step=0)))[0], narrow(_state()))

  def test_newest_are_kept_and_oldest_deleted(self, tmp_path, store):
    for step in (3, 6, 9, 12):
      store.save(_state(step), {})
    assert store.latest_step() == 12
    assert sorted(int(path.name) for path in (tmp_path / "store").iterdir() if path.name.isdigit()) == [9, 12]
    _assert_same(store.restore(_state(step=0), step=9)[0], _state(9))

  def test_chosen_ones_are_removed(self, tmp_path):
    store = _open(tmp_path / "store", keep=None)
    for step in (3, 6, 9):
      store.save(_state(step), {})
    (tmp_path / "store" / "1.removed").mkdir()  # of a process that was killed on the way
    store.remove([9, 3])
    assert store.steps() == [6]
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["6"]
    store.save(_state(9), {})
    assert store.latest_step() == 9
    store.close()

  def test_a_folder_that_is_a_link_is_refused(self, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(checkpoints.DamagedError, match="best is a link"):
      _open(tmp_path / "best")

  def test_f16_best_is_kept_apart_from_the_newest(self, tmp_path):
    newest, best = _open(tmp_path / checkpoints.NEWEST, keep=1), _open(tmp_path / checkpoints.BEST)
    best.save(_state(3), {})
    for step in (3, 6, 9):
      newest.save(_state(step), {})
    assert (best.latest_step(), newest.latest_step()) == (3, 9)
    _assert_same(best.restore(_state(step=0))[0], _state(3))
    newest.close()
    best.close()

  def test_a_step_that_is_there_is_not_written_again(self, store):
    store.save(_state(3), {"first": True})
    store.save(_state(3), {"first": False})
    assert store.restore(_state(step=0))[1] == {"first": True}

  def test_f17_an_unfinished_checkpoint_is_not_listed(self, tmp_path, store):
    store.save(_state(3), {})
    # What a kill leaves behind: Orbax writes under a name of its own and renames.
    (tmp_path / "store" / "6.orbax-checkpoint-tmp" / "network").mkdir(parents=True)
    again = _open(tmp_path / "store", keep=2)
    assert again.latest_step() == 3
    again.save(_state(6), {})
    _assert_same(again.restore(_state(step=0))[0], _state(6))
    again.close()

  def test_empty_folder(self, store):
    assert store.latest_step() is None
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
      store.restore(_state())
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
      store.restore_network(_network())

  @pytest.mark.parametrize(
    ("like", "names"),
    [
      ({"width": 3}, "kernel"),
      ({"tracker": False}, "opt_state"),
      ({"optimizer": optax.trace(0.9)}, "opt_state"),
    ],
    ids=["other_width", "without_tracker", "other_optimizer"],
  )
  def test_f18_another_tree_is_refused_with_what_differs(self, store, like, names):
    store.save(_state(), {})
    with pytest.raises(ValueError, match=names):
      store.restore(_state(**like))


def _network(*args, **kwargs):
  state = _state(*args, **kwargs)
  return {"params": state.params, "batch_stats": state.batch_stats}


class TestLoadNetwork:
  @pytest.fixture
  def other_run(self, tmp_path):
    """A run whose best checkpoint is of step 3, the newest of step 9."""
    for kind, step in ((checkpoints.BEST, 3), (checkpoints.NEWEST, 9)):
      store = _open(tmp_path / kind)
      store.save(_state(step), {})
      store.close()
    return tmp_path

  def test_takes_the_best_network_whatever_the_optimizer(self, other_run):
    network = checkpoints.load_network(str(other_run), _network(0, tracker=False, optimizer=optax.trace(0.9)))
    assert set(network) == {"params", "batch_stats"}
    _assert_same(network["params"], _state(3).params)
    _assert_same(network["batch_stats"], _state(3).batch_stats)

  def test_takes_the_newest_where_there_is_no_best(self, tmp_path):
    store = _open(tmp_path / checkpoints.NEWEST)
    store.save(_state(9), {})
    store.close()
    _open(tmp_path / checkpoints.BEST).close()  # made at the start of a run, still empty
    _assert_same(checkpoints.load_network(str(tmp_path), _network(0))["params"], _state(9).params)

  def test_other_network_is_refused(self, other_run):
    with pytest.raises(ValueError, match=r"(?s)does not fit model.*kernel"):
      checkpoints.load_network(str(other_run), _network(0, width=4))

  def test_folder_without_a_run_is_refused_and_left_alone(self, tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
      with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoints.load_network(str(folder), _network())
    assert list(tmp_path.iterdir()) == []


def _config(**values):
  config = config_lib.default_config()
  config.update_from_flattened_dict({key.replace("__", "."): value for key, value in values.items()})
  return config_lib.resolve(config)


class TestClaim:
  def test_new_folder_receives_the_config(self, tmp_path):
    workdir.claim(tmp_path / "a" / "b", _config(seed=7))
    assert workdir.read_config(tmp_path / "a" / "b")["seed"] == 7
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [workdir.CONFIG]

  def test_check_tells_a_free_folder_and_changes_nothing(self, tmp_path):
    assert workdir.check(tmp_path / "new", _config())
    assert workdir.check(tmp_path, _config())
    assert list(tmp_path.iterdir()) == []
    workdir.claim(tmp_path, _config())
    assert not workdir.check(tmp_path, _config())
    with pytest.raises(ValueError, match="another config"):
      workdir.check(tmp_path, _config(seed=1))

  def test_same_config_goes_on(self, tmp_path):
    workdir.claim(tmp_path, _config())
    before = (tmp_path / workdir.CONFIG).read_text()
    workdir.claim(tmp_path, _config())
    workdir.claim(tmp_path, _config(data__workers=4))  # changes no result
    assert (tmp_path / workdir.CONFIG).read_text() == before

  def test_a_config_of_an_older_version_goes_on(self, tmp_path):
    tree = json.loads(config_lib.to_json(_config()))
    del tree["loss"]["prior"]["until"], tree["log"]
    (tmp_path / workdir.CONFIG).write_text(json.dumps(tree))
    assert not workdir.check(tmp_path, _config())
    with pytest.raises(ValueError, match=r"loss\.prior\.until: 1\.0 there, 0\.5 here"):
      workdir.check(tmp_path, _config(loss__prior__until=0.5))

  def test_other_config_is_refused_with_the_keys(self, tmp_path):
    workdir.claim(tmp_path, _config())
    before = (tmp_path / workdir.CONFIG).read_text()
    with pytest.raises(ValueError, match="another config") as error:
      workdir.claim(tmp_path, _config(optim__learning_rate=0.5, model__width=8))
    lines = str(error.value).splitlines()
    assert "optim.learning_rate: 0.01 there, 0.5 here" in map(str.strip, lines)
    assert "model.width: 64 there, 8 here" in map(str.strip, lines)
    assert len(lines) == 3
    assert str(tmp_path) in lines[0]
    assert (tmp_path / workdir.CONFIG).read_text() == before

  @pytest.mark.parametrize(
    "name",
    [
      *(workdir.METRICS, workdir.RESULTS, workdir.PR_CURVE, "pr_curve.png", "convergence.png", v_history.FILE),
      *(checkpoints.NEWEST, checkpoints.BEST, checkpoints.DAMAGED, checkpoints.VARIABLES, replay.FOLDER),
      *("tensorboard", "evaluation_test.json", "comparison.json", "simulation.json", "stability.json", "benchmark.json"),
    ],
  )
  def test_f66_what_the_run_would_overwrite_is_an_error(self, tmp_path, name):
    (tmp_path / name).write_text("do not lose me")
    (tmp_path / "thesis.tex").write_text("nor me")
    with pytest.raises(ValueError, match=rf"holds {re.escape(name)}, which .*: choose a new folder"):
      workdir.claim(tmp_path, _config())
    assert {path.name for path in tmp_path.iterdir()} == {name, "thesis.tex"}
    assert (tmp_path / name).read_text() == "do not lose me"

  def test_f66_other_files_are_no_obstacle(self, tmp_path):
    (tmp_path / "log").write_text("a scheduler writes here")
    (tmp_path / "code").mkdir()
    (tmp_path / "latest.log").symlink_to(tmp_path / "log")
    (tmp_path / "code" / "data").symlink_to(tmp_path)
    workdir.claim(tmp_path, _config())
    assert not workdir.check(tmp_path, _config())  # and again, to resume
    assert (tmp_path / "log").read_text() == "a scheduler writes here"

  @pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
  def test_f66_a_link_in_the_place_of_what_the_run_writes_is_an_error(self, tmp_path, name):
    workdir.claim(tmp_path, _config())
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is a link"):
      workdir.check(tmp_path, _config())

  def test_f66_the_names_are_those_of_a_run(self):
    """Another file or folder that a run writes must be added to `workdir.WRITES`."""
    names = {path.name for path in runs.finished().workdir.iterdir()} - {workdir.LOCK, workdir.HOLDER}
    assert names == {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in workdir.WRITES)}

  def test_what_a_kill_before_the_first_write_leaves_is_no_obstacle(self, tmp_path):
    (tmp_path / f".{workdir.CONFIG}.tmp").write_text("{")
    workdir.claim(tmp_path, _config())
    assert workdir.read_config(tmp_path)["seed"] == 0

  @pytest.mark.parametrize("text", ["", "{", "\0\0\0"])
  def test_damaged_config_is_told(self, tmp_path, text):
    (tmp_path / workdir.CONFIG).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
      workdir.claim(tmp_path, _config())

  def test_folder_without_a_run_is_told(self, tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
      workdir.read_config(tmp_path)


def _lines(*steps):
  return [{"step": step, "loss": step / 3, "val_mAUPRC": 0.1} for step in steps]


def _write(folder, lines, tail=""):
  (folder / workdir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def _read(folder):
  return [json.loads(line) for line in (folder / workdir.METRICS).read_text().splitlines()]


class TestMetricsLog:
  def test_lines_arrive_in_order(self, tmp_path):
    log = workdir.MetricsLog(tmp_path, last_step=0)
    for line in _lines(1, 2, 3):
      log.write(line)
    log.close()
    assert _read(tmp_path) == _lines(1, 2, 3)

  def test_sync_puts_lines_on_disk(self, tmp_path):
    log = workdir.MetricsLog(tmp_path, last_step=0)
    log.write(_lines(1)[0])
    log.sync()
    assert _read(tmp_path) == _lines(1)
    log.close()

  @pytest.mark.parametrize("tail", ["", '{"step": 6, "lo', '{"step": 6', "\0\0\0"])
  def test_resuming_drops_later_and_broken_lines(self, tmp_path, tail):
    _write(tmp_path, _lines(1, 2, 3, 4, 5), tail)
    log = workdir.MetricsLog(tmp_path, last_step=3)
    assert log.lines == _lines(1, 2, 3)
    log.write(_lines(4)[0])
    log.close()
    assert _read(tmp_path) == log.lines == _lines(1, 2, 3, 4)

  def test_a_line_that_only_lacks_its_end_is_kept_whole(self, tmp_path):
    (tmp_path / workdir.METRICS).write_text(json.dumps(_lines(1)[0]))
    log = workdir.MetricsLog(tmp_path, last_step=1)
    log.write(_lines(2)[0])
    log.close()
    assert _read(tmp_path) == _lines(1, 2)

  def test_reading_ends_at_a_line_that_was_cut_off(self, tmp_path):
    _write(tmp_path, _lines(1, 2), '{"step": 3, ')
    assert list(workdir.read_metrics(tmp_path)) == _lines(1, 2)

  def test_reading_a_missing_file(self, tmp_path):
    assert list(workdir.read_metrics(tmp_path)) == []

  def test_writing_results_replaces_them_whole(self, tmp_path):
    workdir.write_results(tmp_path, {"test": {"mAUPRC": 0.5}, "ks": (1, 10)})
    workdir.write_results(tmp_path, {"test": {"mAUPRC": 0.6}, "ks": (1, 10)})
    assert json.loads((tmp_path / workdir.RESULTS).read_text()) == {"test": {"mAUPRC": 0.6}, "ks": [1, 10]}
    assert [path.name for path in tmp_path.iterdir()] == [workdir.RESULTS]

  @pytest.mark.parametrize("steps", [(1, 2, 4, 5), (1, 2), (1, 2, 3, 3, 4, 5), ()])
  def test_a_log_that_lacks_steps_of_the_checkpoint_is_told_and_left_alone(self, tmp_path, steps):
    _write(tmp_path, _lines(*steps))
    before = (tmp_path / workdir.METRICS).read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl .*it is damaged"):
      workdir.MetricsLog(tmp_path, last_step=5)
    assert (tmp_path / workdir.METRICS).read_bytes() == before


def _damage(path, how):
  """Changes a file of a checkpoint in one of the ways in which files are damaged."""
  content = bytearray(path.read_bytes())
  if how == "flipped":
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
  elif how == "cut":
    path.write_bytes(content[: len(content) // 2])
  elif how == "emptied":
    path.write_bytes(b"")
  else:
    path.unlink()


_PARTS = (
  "network/**/d/*",
  "training/manifest.ocdbt",
  "network/_METADATA",
  "meta/metadata",
  "digests.json",
  "_CHECKPOINT_METADATA",
)


class TestDamage:
  """A file of a checkpoint is not as it was written, whatever its own format notices."""

  @pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "deleted"])
  @pytest.mark.parametrize("part", _PARTS)
  def test_f17_the_one_before_takes_the_place_of_a_damaged_one(self, tmp_path, store, part, how):
    if (part, how) == ("digests.json", "deleted"):
      pytest.skip("a checkpoint without digests is one that a kill has kept from them: as whole as Orbax says")
    for step in (3, 6):
      store.save(_state(step), {"of": step})
    _damage(max((tmp_path / "store" / "6").glob(part), key=lambda path: path.stat().st_size), how)
    again = _open(tmp_path / "store", keep=2)
    state, meta = again.restore_intact(_state(step=0))
    _assert_same(state, _state(3))
    assert meta == {"of": 3}
    # It is out of the way of the step that will be made again, and still there to be looked at.
    assert (tmp_path / checkpoints.DAMAGED / "store_6").is_dir()
    again.save(_state(6), {"of": 6})
    _assert_same(again.restore_intact(_state(step=0))[0], _state(6))
    again.close()

  def test_where_all_are_damaged_nothing_is_moved(self, tmp_path, store):
    for step in (3, 6):
      store.save(_state(step), {})
      _damage(tmp_path / "store" / str(step) / "meta" / "metadata", "cut")
    with pytest.raises(checkpoints.DamagedError, match=r"step 6 in .*is damaged \(meta/metadata has"):
      store.restore_intact(_state(step=0))
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["3", "6"]

  def test_every_reader_looks(self, tmp_path):
    store = _open(tmp_path / checkpoints.BEST)
    store.save(_state(3), {})
    _damage(tmp_path / checkpoints.BEST / "3" / "training" / "manifest.ocdbt", "flipped")
    for read in (lambda: store.restore(_state(0)), store.check, lambda: store.restore_network(_network(0))):
      with pytest.raises(checkpoints.DamagedError, match=r"training/manifest\.ocdbt is not as it was written"):
        read()
    store.close()
    with pytest.raises(checkpoints.DamagedError, match="is damaged"):
      checkpoints.load_network(str(tmp_path), _network(0))

  def test_no_checkpoint_is_none(self, store):
    assert store.restore_intact(_state()) is None

  def test_another_tree_is_no_damage(self, tmp_path, store):
    store.save(_state(), {})
    with pytest.raises(ValueError, match="kernel") as error:
      store.restore_intact(_state(width=3))
    assert not isinstance(error.value, checkpoints.DamagedError)
    assert not (tmp_path / checkpoints.DAMAGED).exists()

  def test_a_kill_before_the_digests(self, tmp_path, store):
    store.save(_state(3), {})
    (tmp_path / "store" / "3" / "digests.json").unlink()
    _assert_same(store.restore_intact(_state(step=0))[0], _state(3))
    store.save(_state(3), {})  # the step comes again
    assert (tmp_path / "store" / "3" / "digests.json").exists()
