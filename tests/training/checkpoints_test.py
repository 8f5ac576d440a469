"""Tests that checkpoints are restored as they were saved.

Digests detect corruption (training/checksums.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soprc_jax import score_ema, tracking
from soprc_jax.training import checkpoints, checksums
from soprc_jax.training.step import TrainState


def _state(step=3, width=2, tracker=True, optimizer=None):
  """Returns a state with every kind of tree that occurs. They are NamedTuples, tuples, empty
  states, scalars and several dtypes.
  """
  params = {
    "backbone": {"conv1": {"kernel": np.full((3, 3, 3, width), 0.1, np.float32)}},
    "head": {
      "kernel": np.arange(width * 2, dtype=np.float32).reshape(width, 2) / 3,
      "bias": np.zeros(2, np.float32),
    },
  }
  parts = [score_ema(num_lists=5, num_points=4, beta=0.1)] if tracker else []
  tx = optax.chain(
    *parts,
    optax.chain(optax.add_decayed_weights(1e-4), optimizer or optax.scale_by_adam()),
    optax.identity(),
  )
  opt_state = tx.init(params)
  rng = np.random.default_rng(step)

  def fill(leaf):
    """Returns other numbers for every leaf and keeps its shape and dtype."""
    if leaf.dtype == np.float32:
      return rng.standard_normal(leaf.shape).astype(np.float32)
    return np.asarray(leaf) + np.int32(step)

  opt_state = jax.tree.map(fill, opt_state)
  stats = {
    "backbone": {
      "bn1": {"bn": {"mean": np.ones(width, np.float32), "var": np.full(width, 1e-38, np.float32)}}
    }
  }
  return TrainState(
    step=np.int32(step), params=jax.tree.map(fill, params), batch_stats=stats, opt_state=opt_state
  )


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
    # NamedTuples keep their type: the tracker finds its own state.
    np.testing.assert_array_equal(
      tracking.find_state(state.opt_state).v, tracking.find_state(saved.opt_state).v
    )

  def test_parameters_of_the_loss_are_stored_apart_from_the_model(self, tmp_path, store):
    proxies = {"proxies": np.arange(6, dtype=np.float32).reshape(3, 2)}
    saved = _state().replace(loss_params=proxies)
    store.save(saved, {})
    like = _state(step=0).replace(loss_params=jax.tree.map(np.zeros_like, proxies))
    _assert_same(store.restore(like)[0], saved)
    network = {"params": saved.params, "batch_stats": saved.batch_stats}
    _assert_same(store.restore_network(network), network)

  def test_another_process_finds_it(self, tmp_path, store):
    store.save(_state(), {})
    again = _open(tmp_path / "store", keep=2)
    assert again.latest_step() == 3
    _assert_same(again.restore(_state(step=0))[0], _state())
    again.close()

  def test_half_precision_leaves_keep_their_dtype(self, store):
    def narrow(state):
      return state.replace(
        params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params)
      )

    store.save(narrow(_state()), {})
    _assert_same(store.restore(narrow(_state(step=0)))[0], narrow(_state()))

  def test_newest_are_kept_and_oldest_deleted(self, tmp_path, store):
    for step in (3, 6, 9, 12):
      store.save(_state(step), {})
    assert store.latest_step() == 12
    assert sorted(
      int(path.name) for path in (tmp_path / "store").iterdir() if path.name.isdigit()
    ) == [9, 12]
    _assert_same(store.restore(_state(step=0), step=9)[0], _state(9))

  def test_chosen_ones_are_removed(self, tmp_path):
    store = _open(tmp_path / "store", keep=None)
    for step in (3, 6, 9):
      store.save(_state(step), {})
    (tmp_path / "store" / "1.removed").mkdir()  # of a process that was killed in between
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
    # State after a kill: Orbax writes under a temporary name and renames it.
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
    """Writes a run whose best checkpoint is of step 3 and whose newest is of step 9."""
    for kind, step in ((checkpoints.BEST, 3), (checkpoints.NEWEST, 9)):
      store = _open(tmp_path / kind)
      store.save(_state(step), {})
      store.close()
    return tmp_path

  def test_takes_the_best_network_whatever_the_optimizer(self, other_run):
    network = checkpoints.load_network(
      str(other_run), _network(0, tracker=False, optimizer=optax.trace(0.9))
    )
    assert set(network) == {"params", "batch_stats"}
    _assert_same(network["params"], _state(3).params)
    _assert_same(network["batch_stats"], _state(3).batch_stats)

  def test_takes_the_newest_where_there_is_no_best(self, tmp_path):
    store = _open(tmp_path / checkpoints.NEWEST)
    store.save(_state(9), {})
    store.close()
    _open(tmp_path / checkpoints.BEST).close()  # created at the start of a run, still empty
    _assert_same(checkpoints.load_network(str(tmp_path), _network(0))["params"], _state(9).params)

  def test_other_network_is_refused(self, other_run):
    with pytest.raises(ValueError, match=r"(?s)does not fit model.*kernel"):
      checkpoints.load_network(str(other_run), _network(0, width=4))

  def test_folder_without_a_run_is_refused_and_left_alone(self, tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
      with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoints.load_network(str(folder), _network())
    assert list(tmp_path.iterdir()) == []


def _damage(path, how):
  """Changes a checkpoint file in one of the ways in which files become corrupt."""
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
  """Tests checkpoint files that differ from what was written. The digests must find it, even where
  the file format itself does not.
  """

  @pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "deleted"])
  @pytest.mark.parametrize("part", _PARTS)
  def test_f17_the_one_before_takes_the_place_of_a_damaged_one(self, tmp_path, store, part, how):
    if (part, how) == ("digests.json", "deleted"):
      pytest.skip(
        "a checkpoint without digests is one that a kill has kept from them: as whole as Orbax says"
      )
    for step in (3, 6):
      store.save(_state(step), {"of": step})
    _damage(max((tmp_path / "store" / "6").glob(part), key=lambda path: path.stat().st_size), how)
    again = _open(tmp_path / "store", keep=2)
    state, meta = again.restore_intact(_state(step=0))
    _assert_same(state, _state(3))
    assert meta == {"of": 3}
    # It has moved away from the step that will be made again, and is kept for inspection.
    assert (tmp_path / checkpoints.DAMAGED / "store_6").is_dir()
    again.save(_state(6), {"of": 6})
    _assert_same(again.restore_intact(_state(step=0))[0], _state(6))
    again.close()

  def test_where_all_are_damaged_nothing_is_moved(self, tmp_path, store):
    for step in (3, 6):
      store.save(_state(step), {})
      _damage(tmp_path / "store" / str(step) / "meta" / "metadata", "cut")
    with pytest.raises(
      checkpoints.DamagedError, match=r"step 6 in .*is corrupt \(meta/metadata has"
    ):
      store.restore_intact(_state(step=0))
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["3", "6"]

  def test_every_reader_looks(self, tmp_path):
    store = _open(tmp_path / checkpoints.BEST)
    store.save(_state(3), {})
    _damage(tmp_path / checkpoints.BEST / "3" / "training" / "manifest.ocdbt", "flipped")
    for read in (
      lambda: store.restore(_state(0)),
      store.check,
      lambda: store.restore_network(_network(0)),
    ):
      with pytest.raises(
        checkpoints.DamagedError, match=r"training/manifest\.ocdbt is not as it was written"
      ):
        read()
    store.close()
    with pytest.raises(checkpoints.DamagedError, match="is corrupt"):
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
    store.save(_state(3), {})  # the step is made again
    assert (tmp_path / "store" / "3" / "digests.json").exists()

  def test_a_kill_within_the_digests(self, tmp_path, store):
    store.save(_state(3), {})
    (tmp_path / "store" / "3" / ".digests.json.0123456789abcdef.tmp").write_text("{")
    checksums.write(tmp_path / "store" / "3")
    (tmp_path / "store" / "3" / ".digests.json.0123456789abcdef.tmp").unlink()
    assert checksums.problem(tmp_path / "store" / "3") is None
