"""Checkpoints with Orbax: the newest ones for resuming, the best on val kept apart."""

from collections.abc import Callable, Collection
import errno
import hashlib
import logging
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from soprc_jax._internal import file_io
from soprc_jax.models import pretrained
from soprc_jax.training import checksums, parallel
from soprc_jax.training.step import TrainState

_log = logging.getLogger(__name__)

_OVERHEAD = 1 << 20  # bytes of a checkpoint beside its arrays, generously
_SHOWN = 4  # arrays that a message names
_REMOVED = ".removed"  # ending of a checkpoint on its way out
NEWEST = "checkpoints"
BEST = "best"
# Where checkpoints go whose files are not those that were written.
DAMAGED = "damaged"
# Network alone, of experiments.convert_weights.
VARIABLES = "variables"


class DamagedError(ValueError):
  """The files of a checkpoint are not those that were written."""


class Store:
  """Checkpoints of one kind in one folder, oldest deleted first.

  Only finished checkpoints are listed: Orbax writes aside and renames, so a killed run leaves none
  half written. ``save`` returns when the files are on disk. Their digests lie beside them, and
  every reader compares (`checksums`): formats of arrays do not notice all damage.

  Args:
    folder: absolute path; made if it is missing.
    keep: number of checkpoints to keep; None keeps all that `remove` does not take.

  Raises:
    DamagedError: the folder is a link.
  """

  def __init__(self, folder: Path, *, keep: int | None = 1):
    if folder.is_symlink():  # see `checksums.problem`
      raise DamagedError(
        f"{folder} is a link, and checkpoints are not read through links: put the folder itself "
        "there"
      )
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    self._manager = ocp.CheckpointManager(folder, options=options)
    self._folder = folder

  def latest_step(self) -> int | None:
    """Step of the newest checkpoint, None if there is none."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Steps of the checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def remove(self, steps: Collection[int]) -> None:
    """Deletes checkpoints; all processes name the same ones. A kill on the way leaves none half
    deleted among those that are listed.
    """
    if parallel.is_main():
      for step in steps:
        (self._folder / str(step)).rename(self._folder / f"{step}{_REMOVED}")
      for left in self._folder.glob(f"*{_REMOVED}"):
        shutil.rmtree(left)
    if steps:
      parallel.wait_for_all("checkpoints are removed")
      self._manager.reload()

  def save(self, state: TrainState, meta: dict[str, Any]) -> None:
    """Writes ``state`` (numpy leaves) and the JSON-able ``meta``; nothing if its step is there
    already.

    Raises:
      OSError: there is no space for it.
    """
    step = int(state.step)
    if step in self._manager.all_steps():
      if parallel.is_main() and not checksums.exists(self._folder / str(step)):
        checksums.write(
          self._folder / str(step)
        )  # a kill came between the checkpoint and its digests
      return
    self._check_space(state)
    network, rest = _parts(state)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        network=ocp.args.StandardSave(network),
        training=ocp.args.StandardSave(rest),
        meta=ocp.args.JsonSave(meta),
      ),
      force=True,
    )
    self._manager.wait_until_finished()
    if parallel.is_main():
      checksums.write(self._folder / str(step))

  def _check_space(self, state: TrainState) -> None:
    """Raises an OSError if the disk has no room: told here, before Orbax's threads each tell it in
    their own way.
    """
    needed = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state)) + _OVERHEAD
    free = shutil.disk_usage(self._folder).free
    if free < needed:
      raise OSError(
        errno.ENOSPC,
        f"a checkpoint of {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free",
        str(self._folder),
      )

  def restore_intact(
    self, like: TrainState, *, check: Callable[[dict[str, Any]], None] = lambda meta: None
  ) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest checkpoint that is not damaged, as of `restore`; None if there is none at all.
    Damaged ones are set aside with a warning.

    Args:
      like: see `restore`.
      check: gets what `save` was given beside the state, before the arrays are read: it may raise a
        better error than arrays of another shape.

    Raises:
      DamagedError: there are checkpoints, and all are damaged.
      ValueError: as `restore`.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    problems = {}
    for step in steps:
      problem = checksums.problem(self._folder / str(step))
      if problem is None:
        break
      problems[step] = problem
    if len(problems) == len(steps):
      if steps:
        self.check(steps[0])
      return None
    parallel.wait_for_all("the checkpoints have been looked at")
    for step, problem in problems.items():
      self._set_aside(step, problem)
    parallel.wait_for_all("the damaged checkpoints are set aside")
    self._manager.reload()
    check(self._meta(steps[len(problems)]))
    return self._read(like, steps[len(problems)])

  def check(self, step: int | None = None) -> None:
    """Raises a DamagedError if the newest checkpoint (or that of ``step``) is damaged."""
    step = self._manager.latest_step() if step is None else step
    problem = None if step is None else checksums.problem(self._folder / str(step))
    if problem is not None:
      raise DamagedError(
        f"the checkpoint of step {step} in {self._folder} is damaged ({problem}): restore it from "
        "a copy, or move the folder of the run "
        "away and train again"
      )

  def _set_aside(self, step: int, problem: str) -> None:
    """Moves a damaged checkpoint out of the way of the one that will be written in its place."""
    aside = self._folder.parent / DAMAGED / f"{self._folder.name}_{step}"
    while aside.exists():
      aside = aside.with_name(aside.name + "_")
    _log.warning(
      "The checkpoint of step %d is damaged (%s): it is now %s; an older one takes its place.",
      step,
      problem,
      aside,
    )
    if parallel.is_main():
      aside.parent.mkdir(exist_ok=True)
      (self._folder / str(step)).rename(aside)

  def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint (or that of ``step``), in the structure of ``like``.

    Raises:
      FileNotFoundError: there is none.
      DamagedError: its files are not those that were written.
      ValueError: the checkpoint's tree does not fit ``like``; the message has Orbax's comparison.
    """
    step = self._manager.latest_step() if step is None else step
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self._folder}")
    self.check(step)
    return self._read(like, step)

  def _read(self, like: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
    """A checkpoint whose files have been looked at."""
    network, rest = _parts(jax.tree.map(_abstract, like))
    found = self._manager.restore(
      step,
      args=ocp.args.Composite(
        network=ocp.args.StandardRestore(network),
        training=ocp.args.StandardRestore(rest),
        meta=ocp.args.JsonRestore(),
      ),
    )
    parts = _checked(found["network"], network), _checked(found["training"], rest)
    return TrainState(**parts[0], **parts[1]), found["meta"]

  def restore_network(self, like: dict[str, Any]) -> dict[str, Any]:
    """Only ``params`` and ``batch_stats`` of the newest checkpoint, in the structure of
    ``like``.
    """
    step = self._manager.latest_step()
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self._folder}")
    self.check(step)
    network = jax.tree.map(_abstract, like)
    args = ocp.args.Composite(network=ocp.args.StandardRestore(network))
    return _checked(self._manager.restore(step, args=args)["network"], network)

  def meta(self) -> dict[str, Any]:
    """What `save` was given beside the state of the newest checkpoint.

    Raises:
      FileNotFoundError: there is none.
      DamagedError: its files are not those that were written.
    """
    step = self._manager.latest_step()
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self._folder}")
    self.check(step)
    return self._meta(step)

  def _meta(self, step: int) -> dict[str, Any]:
    return dict(
      self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
    )

  def close(self) -> None:
    """Waits for what is being written and releases the folder."""
    self._manager.close()


def save_variables(folder: Path, variables: dict[str, Any]) -> None:
  """Writes ``{"params": ..., "batch_stats": ...}`` alone, as `load_network` takes it."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / VARIABLES, variables)


def load_variables(folder: Path) -> dict[str, Any]:
  """Reads what `save_variables` wrote, as numpy arrays.

  Raises:
    DamagedError: its files are not those that were written.
  """
  problem = checksums.problem(folder / VARIABLES)
  if problem is not None:
    raise DamagedError(
      f"{folder / VARIABLES} is damaged ({problem}): write it again with soprc convert-weights"
    )
  with ocp.StandardCheckpointer() as checkpointer:
    found: dict[str, Any] = jax.tree.map(np.asarray, checkpointer.restore(folder / VARIABLES))
  return found


def fingerprint(source: str) -> str:
  """SHA-256 of the files that `load_network` reads; of a name on the hub, the name."""
  if source.startswith(pretrained.HUB):
    return source
  path = (
    file_io.given(source, name="model.init_from") if pretrained.is_file(source) else _find(source)
  )
  digest = hashlib.sha256()
  for file in [path] if path.is_file() else sorted(path.rglob("*")):
    if file.is_file():
      digest.update(file.relative_to(path.parent).as_posix().encode())
      digest.update(file.read_bytes())
  return digest.hexdigest()


def check_start(source: str) -> None:
  """Raises an error if there is nothing at a source for `load_network` to read; nothing is loaded.

  Raises:
    FileNotFoundError: there is no checkpoint or file.
    ValueError: the source is a file of an unknown kind, or no path of this machine.
  """
  if pretrained.is_file(source):
    pretrained.check(source)
  else:
    _find(source)


def load_network(source: str, like: dict[str, Any]) -> dict[str, Any]:
  """``params`` and ``batch_stats`` to start from.

  Args:
    source: workdir of another run (its best, else its newest checkpoint), a folder of
      `save_variables`, or a weights file as of `pretrained.read`.
    like: ``{"params", "batch_stats"}`` of the network, abstract or not; its head is kept where
      weights have one of another size.

  Raises:
    FileNotFoundError: there is no checkpoint or file.
    ValueError: the network is of another shape; the file cannot be read.
  """
  if pretrained.is_file(source):
    return _fitted(pretrained.to_flax(pretrained.read(source)), like, source)
  folder = _find(source)
  if folder.name == VARIABLES:
    return _fitted(load_variables(folder.parent), like, source)
  store = Store(folder)
  try:
    return store.restore_network(like)
  except DamagedError:
    raise
  except (ValueError, KeyError) as error:
    raise ValueError(
      f"the network in {source} does not fit model.* of this config (same name, width, stem, "
      f"embedding_dim?):\n{error}"
    ) from error
  finally:
    store.close()


def find_meta(source: str) -> dict[str, Any] | None:
  """Returns what `Store.save` was given beside the network that `load_network` loads; None for
  weights.

  Raises:
    FileNotFoundError: there is no checkpoint.
    DamagedError: its files are not those that were written.
  """
  folder = None if pretrained.is_file(source) else _find(source)
  if folder is None or folder.name == VARIABLES:
    return None
  store = Store(folder)
  try:
    return store.meta()
  finally:
    store.close()


def _find(source: str) -> Path:
  """Folder of the variables, or of the best or the newest checkpoint of a run."""
  workdir = file_io.given(source, name="model.init_from").absolute()
  if workdir.is_file():
    raise ValueError(
      f"model.init_from={source} is a file of an unknown kind: the name of a file of weights ends "
      "in one of " + ", ".join(pretrained.SUFFIXES)
    )
  if (workdir / VARIABLES).is_dir():
    return workdir / VARIABLES
  for kind in (BEST, NEWEST):
    if (workdir / kind).is_dir():
      store = Store(workdir / kind)
      step = store.latest_step()
      store.close()
      if step is not None:
        return workdir / kind
  raise FileNotFoundError(
    f"model.init_from={source!r} holds no checkpoint: give the --workdir of a run of soprc train, "
    "the --output of "
    f"experiments.convert_weights, a file ({', '.join(pretrained.SUFFIXES)}) or "
    "hf://USER/REPOSITORY"
  )


def _fitted(variables: dict[str, Any], like: dict[str, Any], source: str) -> dict[str, Any]:
  network, has_head = pretrained.fit(variables, like, source=source)
  _log.info(
    "Starting from the weights in %s, %s.",
    source,
    "head included" if has_head else "with a new head",
  )
  return network


def _parts(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
  """What another run can start from, and what only this run needs."""
  network = {"params": state.params, "batch_stats": state.batch_stats}
  return network, {"step": state.step, "opt_state": state.opt_state}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _checked(found: Any, wanted: Any) -> Any:
  """The restored tree as numpy; Orbax compares its structure with the target, but not the shapes of
  numpy leaves.

  Raises:
    ValueError: names the first arrays of another shape or dtype.
  """
  wrong = []

  def leaf(path: Any, array: Any, target: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.asarray(array)
    if array.shape != target.shape or array.dtype != target.dtype:
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      wrong.append(
        f"  {name}: {array.dtype}{list(array.shape)} there, {target.dtype}{list(target.shape)} "
        "wanted"
      )
    return array

  tree = jax.tree_util.tree_map_with_path(leaf, found, wanted)
  if wrong:
    more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    raise ValueError(
      "the checkpoint has arrays of another shape:\n" + "\n".join([*wrong[:_SHOWN], *more])
    )
  return tree
