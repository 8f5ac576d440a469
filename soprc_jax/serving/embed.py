"""Embeds images and makes an index of them."""

from pathlib import Path

import numpy as np

from soprc_jax._internal.strings import printable
from soprc_jax.data import datasets, sources
from soprc_jax.serving import image_inputs
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import network as network_lib
from soprc_jax.training import evaluation


def make_index(
  network: network_lib.Network,
  source: sources.Source,
  *,
  split: str = "",
  root: str = "",
  embed: network_lib.EmbedFn | None = None,
  may_be_empty: bool = False,
) -> index_lib.Index:
  """Embeds all images of a source and makes their index; each file is read once.

  Args:
    network: the model that embeds.
    source: images. The labels of a split are kept; those of `image_inputs.Named` have no meaning.
    split: name of the split of the data set; empty for the user's own images.
    root: see `soprc_jax.serving.index.Index`; not needed for a split.
    embed: function compiled for this model, see `network.make_embed`; None compiles one.
    may_be_empty: whether all images may be unreadable, if unreadable ones are skipped.

  Raises:
    ValueError: if an image is unreadable and must not be skipped, or if all are unreadable.
  """
  noted, has_vectors = _Noted(source), sources.width(source) > 0
  embed = embed or network_lib.make_embed(network, at_most=len(source))
  embedded = embed(source if has_vectors else noted)
  if has_vectors:  # they are not read one by one
    for index in range(len(source)):
      noted[index]
  at, rule = embedded.positions, datasets.label_rule(network.config.data)
  if not (at.size or may_be_empty):
    raise ValueError(f"none of the {len(source)} images can be decoded")
  left_out = np.setdiff1d(np.arange(len(source)), at)
  return index_lib.Index(
    embeddings=np.asarray(embedded.embeddings, np.float32),
    ids=np.array([noted.ids[i] for i in at], np.str_),
    class_names=np.array(
      [noted.class_names[i] or (str(source.labels[i]) if split else "") for i in at], np.str_
    ),
    labels=np.asarray(embedded.labels if split else [], np.int64),
    positions=np.asarray(at, np.int64),
    broken_ids=np.array([noted.ids[i] for i in left_out], np.str_),
    split=split,
    root=network.config.data.root if split else root,
    workdir=str(network.workdir),
    step=network.step,
    digest=network.digest,
    model=network.architecture,
    image_size=network.image_size,
    resize=network.resize,
    label_rule=rule.to_text() if rule else "",
  )


def of_split(network: network_lib.Network, split: str) -> index_lib.Index:
  """Makes the index of a split of the data of a run.

  Args:
    network: model of the run.
    split: name of the split.

  Raises:
    ValueError: as `make_index`, or if there is no such split, or if the data are invalid.
    FileNotFoundError: if the data are missing.
  """
  return make_index(network, split_source(network, split), split=split)


def split_source(network: network_lib.Network, split: str) -> sources.Source:
  """Returns the source of a split of the data of a run.

  Raises:
    ValueError, FileNotFoundError: as `of_split`.
  """
  return evaluation.pick_split(datasets.make_splits(network.config.data), split)


def of_images(
  network: network_lib.Network, source: sources.Source, *, may_be_empty: bool = False
) -> index_lib.Index:
  """Makes the index of the user's images or vectors, see `image_inputs.find`.

  Args:
    network: the model that embeds.
    source: the images or vectors.
    may_be_empty: see `make_index`.

  Raises:
    ValueError: as `make_index`, or if a link is broken and must not be skipped.
  """
  if not isinstance(source, image_inputs.Named):
    return make_index(network, source, may_be_empty=may_be_empty)
  if network.config.data.on_broken != "skip":  # before the first image is embedded
    image_inputs.check_links(source)
  return make_index(network, source, root=str(source.root), may_be_empty=may_be_empty)


def summary(index: index_lib.Index, path: Path) -> str:
  """Returns a readable summary of what was embedded."""
  count, width = index.embeddings.shape
  what = "images" if index.image_size else "stored embeddings"
  line = (
    f"Embedded {count} {what} as vectors of width {width} with step {index.step} of "
    f"{printable(index.workdir)}."
  )
  if len(index.broken_ids):
    line += (
      f" Unreadable images, skipped: {len(index.broken_ids)}, e.g. "
      f"{printable(index.broken_ids[0])}."
    )
  return f"{line}\nWritten to {printable(path)}"


class _Noted:
  """Records ids and class names while the images are read, since they are known only then."""

  def __init__(self, source: sources.Source):
    self._source, self.labels = source, source.labels
    self.ids: dict[int, str] = {}
    self.class_names: dict[int, str] = {}

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> sources.Example:
    example = self._source[index]
    self.ids[index], self.class_names[index] = example.id, example.class_name
    return example
