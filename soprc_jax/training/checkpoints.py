"""Checkpoints with Orbax: the newest for resuming, and the one of the best validation mAUPRC."""

from collections.abc import Callable, Collection, Mapping
import contextlib
import errno
import hashlib
import json
import logging
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from soprc_jax._internal import file_io
from soprc_jax.models import pretrained
from soprc_jax.training import checksums, finetuning, lora, parallel
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.step import TrainState

_log = logging.getLogger(__name__)

_OVERHEAD = 1 << 20  # upper bound on the bytes of a checkpoint besides its arrays
_SHOWN = 4  # arrays that a message names
_REMOVED = ".removed"  # suffix of a checkpoint that is being deleted
NEWEST = "checkpoints"
BEST = "best"
# Folder that corrupt checkpoints are moved to.
DAMAGED = "damaged"
# Weights only, as written by soprc convert-weights.
VARIABLES = "variables"
# File in that folder with what the arrays do not tell, see `vit_start`.
DESCRIPTION = "model.json"


class DamagedError(ValueError):
  """Raised when the files of a checkpoint are corrupt: not those that were written."""


class Store:
  """Checkpoints of one kind in one folder. The oldest is deleted first.

  Only finished checkpoints are listed. Orbax writes under a temporary name and renames, so a killed
  run leaves no half-written checkpoint. `save` returns when the files are on disk. The digests of
  the files are stored with them, and every reader compares (`checksums`), since array formats do
  not detect all corruption.

  Args:
    folder: absolute path; created if it is missing.
    keep: number of checkpoints to keep; None keeps all that `remove` does not delete.

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
    """Returns the step of the newest checkpoint, None if there is none."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Returns the steps of the checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def remove(self, steps: Collection[int]) -> None:
    """Deletes the checkpoints of some steps. All processes pass the same steps.

    If the process is killed meanwhile, no listed checkpoint is half deleted.
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
    """Writes a checkpoint. Does nothing if its step is saved already.

    Args:
      state: numpy leaves.
      meta: JSON-able metadata.

    Raises:
      OSError: there is no space for it.
    """
    step = int(state.step)
    if step in self._manager.all_steps():
      # The process may have been killed between the checkpoint and its digests.
      if parallel.is_main() and not checksums.exists(self._folder / str(step)):
        checksums.write(self._folder / str(step))
      return
    network, rest = _parts(state, lora.merged(state.params))
    self._check_space((network, rest))
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

  def _check_space(self, arrays: Any) -> None:
    """Raises an OSError if the disk has too little space.

    This comes before Orbax writes: each of its threads would raise a different error.
    """
    needed = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(arrays)) + _OVERHEAD
    free = shutil.disk_usage(self._folder).free
    if free < needed:
      raise OSError(
        errno.ENOSPC,
        f"a checkpoint needs {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free",
        str(self._folder),
      )

  def restore_intact(
    self, like: TrainState, *, check: Callable[[dict[str, Any]], None] = lambda meta: None
  ) -> tuple[TrainState, dict[str, Any]] | None:
    """Restores the newest checkpoint that is not corrupt; None if there is no checkpoint.

    Corrupt checkpoints are moved aside with a warning.

    Args:
      like: see `restore`.
      check: function of the metadata, called before the arrays are read. It may raise a clearer
        error than that of arrays of another shape.

    Raises:
      DamagedError: there are checkpoints, and all are corrupt.
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
    parallel.wait_for_all("the checkpoints are verified")
    for step, problem in problems.items():
      self._set_aside(step, problem)
    parallel.wait_for_all("the corrupt checkpoints are moved aside")
    self._manager.reload()
    check(self._meta(steps[len(problems)]))
    return self._read(like, steps[len(problems)])

  def check(self, step: int | None = None) -> None:
    """Raises a DamagedError if the newest checkpoint, or that of ``step``, is corrupt."""
    step = self._manager.latest_step() if step is None else step
    problem = None if step is None else checksums.problem(self._folder / str(step))
    if problem is not None:
      raise DamagedError(
        f"the checkpoint of step {step} in {self._folder} is corrupt ({problem}): restore it from "
        "a copy, or move the folder of the run away and train again"
      )

  def _set_aside(self, step: int, problem: str) -> None:
    """Moves a corrupt checkpoint away, so that its step can be saved again."""
    aside = self._folder.parent / DAMAGED / f"{self._folder.name}_{step}"
    while aside.exists():
      aside = aside.with_name(aside.name + "_")
    _log.warning(
      "The checkpoint of step %d is corrupt (%s). It was moved to %s, and an older one is used.",
      step,
      problem,
      aside,
    )
    if parallel.is_main():
      aside.parent.mkdir(exist_ok=True)
      (self._folder / str(step)).rename(aside)

  def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
    """Restores the newest checkpoint, or that of ``step``.

    Args:
      like: state with the structure, shapes and dtypes of the checkpoint; abstract or not.
      step: step of the checkpoint; None takes the newest.

    Returns:
      The state, numpy leaves, and the metadata that `save` was called with.

    Raises:
      FileNotFoundError: there is no checkpoint.
      DamagedError: its files are not those that were written.
      ValueError: the checkpoint's tree does not fit ``like``; the message has Orbax's comparison.
    """
    return self._read(like, self._verified(step))

  def _verified(self, step: int | None = None) -> int:
    """Returns the newest step, or ``step``, once its files are verified."""
    step = self._manager.latest_step() if step is None else step
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self._folder}")
    self.check(step)
    return step

  def _read(self, like: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint whose files have been verified."""
    like = jax.tree.map(_abstract, like)
    network, rest = _parts(like, lora.base(like.params))
    found = self._manager.restore(
      step,
      args=ocp.args.Composite(
        network=ocp.args.StandardRestore(network),
        training=ocp.args.StandardRestore(rest),
        meta=ocp.args.JsonRestore(),
      ),
    )
    parts = _checked(found["network"], network), _checked(found["training"], rest)
    return TrainState(**(parts[0] | parts[1])), found["meta"]

  def restore_network(self, like: dict[str, Any]) -> dict[str, Any]:
    """Restores ``params`` and ``batch_stats`` of the newest checkpoint, and nothing else.

    Args:
      like: ``{"params", "batch_stats"}`` with the structure, shapes and dtypes of the checkpoint.
    """
    step = self._verified()
    network = jax.tree.map(_abstract, like)
    args = ocp.args.Composite(network=ocp.args.StandardRestore(network))
    return _checked(self._manager.restore(step, args=args)["network"], network)

  def meta(self) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint, as passed to `save`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      DamagedError: its files are not those that were written.
    """
    return self._meta(self._verified())

  def _meta(self, step: int) -> dict[str, Any]:
    return dict(
      self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
    )

  def close(self) -> None:
    """Waits for pending writes and releases the folder."""
    self._manager.close()


def save_variables(
  folder: Path, variables: dict[str, Any], description: Mapping[str, Any] | None = None
) -> None:
  """Writes ``{"params": ..., "batch_stats": ...}`` without other state, for `load_network`.

  Args:
    folder: folder of the checkpoint.
    variables: variables of an `EmbeddingNet`.
    description: content of a JSON file with what the arrays do not tell; None: no file.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / VARIABLES, variables)
  if description is not None:
    text = json.dumps(description, indent=2) + "\n"
    workdir_lib.write_atomically(folder / VARIABLES / DESCRIPTION, text)
  checksums.write(folder / VARIABLES)


def load_variables(folder: Path) -> dict[str, Any]:
  """Reads the variables that `save_variables` wrote, as numpy arrays.

  Raises:
    DamagedError: its files are not those that were written.
  """
  problem = checksums.problem(folder / VARIABLES)
  if problem is None:
    try:
      with ocp.StandardCheckpointer() as checkpointer:
        found: dict[str, Any] = jax.tree.map(np.asarray, checkpointer.restore(folder / VARIABLES))
      return found
    except Exception as error:  # tensorstore, JSON and msgpack fail in many ways
      problem = (str(error).splitlines() or [type(error).__name__])[0]
  raise DamagedError(
    f"{folder / VARIABLES} is corrupt ({problem}): write it again with soprc convert-weights"
  )


def fingerprint(source: str) -> str:
  """Returns the SHA-256 of the files that `load_network` reads; for a name on the hub, the name."""
  if source.startswith(pretrained.HUB):
    return source
  path = (
    file_io.given(source, name="model.init_from")
    if pretrained.is_file(source)
    else find_folder(source)
  )
  digest = hashlib.sha256()
  for file in [path] if path.is_file() else sorted(path.rglob("*")):
    if file.is_file():
      digest.update(file.relative_to(path.parent).as_posix().encode())
      digest.update(file.read_bytes())
  return digest.hexdigest()


def check_start(source: str) -> None:
  """Raises an error if a source has nothing that `load_network` can read. Loads nothing.

  Raises:
    FileNotFoundError: there is no checkpoint or file.
    ValueError: the source is a file of unknown type, or not a local path.
  """
  if pretrained.is_file(source):
    pretrained.check(source)
  else:
    find_folder(source)


def load_network(source: str, like: dict[str, Any]) -> dict[str, Any]:
  """Loads ``params`` and ``batch_stats`` to start a run from.

  Args:
    source: workdir of another run (its best, else its newest checkpoint), a folder of
      `save_variables`, or a weights file that `pretrained.read` reads.
    like: ``{"params", "batch_stats"}`` of the model, abstract or not. Its head is kept where the
      head in the weights has another size.

  Raises:
    FileNotFoundError: there is no checkpoint or file.
    ValueError: the model has other shapes; the file cannot be read.
  """
  if pretrained.is_file(source):
    return _fitted(pretrained.load(source), like, source)
  folder = find_folder(source)
  if folder.name == VARIABLES:
    return _fitted(load_variables(folder.parent), like, source)
  with contextlib.closing(Store(folder)) as store:
    try:
      return store.restore_network(like)
    except DamagedError:
      raise
    except (ValueError, KeyError) as error:
      raise ValueError(
        f"the model in {source} does not fit model.* of this config (same name, width, stem, "
        f"embedding_dim?):\n{error}"
      ) from error


def find_meta(source: str) -> dict[str, Any] | None:
  """Returns the metadata of the checkpoint that `load_network` loads; None for weights files.

  Raises:
    FileNotFoundError: there is no checkpoint.
    DamagedError: its files are not those that were written.
  """
  folder = None if pretrained.is_file(source) else find_folder(source)
  if folder is None or folder.name == VARIABLES:
    return None
  with contextlib.closing(Store(folder)) as store:
    return store.meta()


def find_folder(source: str) -> Path:
  """Returns the folder of the variables, or of the best or newest checkpoint of a run."""
  workdir = file_io.given(source, name="model.init_from").absolute()
  if workdir.is_file():
    raise ValueError(
      f"model.init_from={source} is a file of unknown type: the name of a weights file ends in one "
      "of " + ", ".join(pretrained.SUFFIXES)
    )
  if (workdir / VARIABLES).is_dir():
    return workdir / VARIABLES
  for kind in (BEST, NEWEST):
    if (workdir / kind).is_dir():
      with contextlib.closing(Store(workdir / kind)) as store:
        if store.latest_step() is not None:
          return workdir / kind
  raise FileNotFoundError(
    f"model.init_from={source!r} holds no checkpoint: give the --workdir of a soprc train run, the "
    f"--output of soprc convert-weights, a file ({', '.join(pretrained.SUFFIXES)}) or "
    "hf://USER/REPOSITORY"
  )


def _fitted(variables: dict[str, Any], like: dict[str, Any], source: str) -> dict[str, Any]:
  network, has_head = pretrained.fit(variables, like, source=source)
  head = ", head included" if has_head else ", with a new head"
  _log.info("Starting from the weights in %s%s.", source, head if "head" in like["params"] else "")
  return network


def _parts(state: TrainState, params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits a state into the model, which other runs can start from, and the rest.

  The rest of a run with adapters has its own parameters, since the merged ones do not determine
  them.

  Args:
    state: state of a run.
    params: parameters of the model, those of ``state`` with merged adapters.
  """
  network = {"params": params, "batch_stats": state.batch_stats}
  rest = {"step": state.step, "opt_state": state.opt_state}
  if jax.tree.leaves(state.loss_params):
    rest["loss_params"] = state.loss_params
  if finetuning.ADAPTERS in state.params:
    rest["params"] = state.params
  return network, rest


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _checked(found: Any, wanted: Any) -> Any:
  """Returns the restored tree as numpy arrays.

  Orbax compares the structure with the target, but not the shapes of numpy leaves.

  Raises:
    ValueError: arrays have another shape or dtype; the message names the first ones.
  """
  wrong = []

  def leaf(path: Any, array: Any, target: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.asarray(array)
    if array.shape != target.shape or array.dtype != target.dtype:
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      wrong.append(
        f"  {name}: {array.dtype}{list(array.shape)} in the checkpoint, "
        f"{target.dtype}{list(target.shape)} expected"
      )
    return array

  tree = jax.tree_util.tree_map_with_path(leaf, found, wanted)
  if wrong:
    more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    raise ValueError(
      "the checkpoint has arrays of another shape or dtype:\n" + "\n".join([*wrong[:_SHOWN], *more])
    )
  return tree
