"""Writes small data sets to disk in the formats of the real ones."""

import numpy as np
from PIL import Image

from soprc_jax.data import datasets, decoding, glyphs
from soprc_jax.data import rendered as rendered_lib
from soprc_jax.training import config as config_lib

PER_CLASS = 4


def pixels(label, index):
  """Returns ``[24, 30, 3]`` pixels: a class has its colors, an image its stripes."""
  rng = np.random.default_rng([7, label])
  image = np.broadcast_to(rng.integers(0, 200, 3).astype(np.uint8), (24, 30, 3)).copy()
  image[index % 6 * 4 : index % 6 * 4 + 4] += 40
  return image


def write(path, label, index):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels(label, index)).save(path)


def folder(root, num_classes, per_class=PER_CLASS):
  """Writes one subfolder per class, as PNG."""
  for label in range(num_classes):
    for index in range(per_class):
      write(root / f"class_{label:03d}" / f"{index}.png", label, index)
  return root


def glyph_folder(root, num_classes, per_class):
  """Writes glyphs as PNG files, one subfolder per character. Returns the same images as a source in
  memory.
  """
  everything = glyphs.load()
  codes = np.unique(everything.labels)[:num_classes]
  kept = np.concatenate([np.flatnonzero(everything.labels == code)[:per_class] for code in codes])
  for number, position in enumerate(kept):
    example = everything[position]
    path = (
      root / str(example.label) / f"{number:05d}_{example.id.split('/')[1]}.png"
    )  # sorted by name: in the same order
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(example.image[:, :, 0]).save(path)
  return rendered_lib.Rendered(
    everything.images[kept], everything.labels[kept], np.array(everything.ids)[kept]
  )


def csv(root, num_classes, split=None):
  """Writes ``images.csv`` next to the class folders; ``split(label)`` gives the third column."""
  folder(root, num_classes)
  lines = ["path,label" + (",split" if split else "")]
  for label in range(num_classes):
    for index in range(PER_CLASS):
      lines.append(
        f"class_{label:03d}/{index}.png,thing {label}" + (f",{split(label)}" if split else "")
      )
  (root / "images.csv").write_text("\n".join(lines) + "\n")
  return root / "images.csv"


def sop(root, num_train, num_test):
  """Writes Stanford Online Products: two lists with a header. Class ids start at 1, test classes
  follow the training classes.
  """
  number = 0
  for name, labels in (
    ("train", range(1, num_train + 1)),
    ("test", range(num_train + 1, num_train + num_test + 1)),
  ):
    lines = ["image_id class_id super_class_id path"]
    for label in labels:
      for index in range(PER_CLASS):
        number += 1
        path = f"bicycle_final/11108512{label}_{index}.JPG"
        write(root / path, label, index)
        lines.append(f"{number} {label} 1 {path}")
    (root / f"Ebay_{name}.txt").write_text("\n".join(lines) + "\n")
  return root


def inaturalist(root, num_train, num_test):
  """Writes iNaturalist with the lists of SmoothAP. A list has one path per line, whose last two
  folders are the class.
  """
  lists = root / "Inat_dataset_splits"
  lists.mkdir(parents=True)
  for name, labels in (
    ("train", range(num_train)),
    ("test", range(num_train, num_train + num_test)),
  ):
    lines = []
    for label in labels:
      for index in range(PER_CLASS):
        kind = "Aves" if label % 2 else "Insecta"
        path = f"train_val2018/{kind}/{label + 2800}/{label:04d}{index:04d}abc.jpg"
        write(root / path, label, index)
        lines.append(path)
    (lists / f"Inaturalist_{name}_set1.txt").write_text("\n".join(lines) + "\n")
  return root


def vehicle_id(root, num_train, num_tests=(2, 4, 6)):
  """Writes PKU VehicleID: lists of two numbers; the larger test lists include the smaller ones."""
  lists = root / "train_test_split"
  lists.mkdir(parents=True)

  def rows(labels):
    found = []
    for label in labels:
      for index in range(PER_CLASS):
        image = label * 10 + index
        write(root / "image" / f"{image:07d}.jpg", label, index)
        found.append(f"{image:07d} {label:05d}")
    return "\n".join(found) + "\n"

  (lists / "train_list.txt").write_text(rows(range(1, num_train + 1)))
  for size, count in zip((800, 1600, 2400), num_tests):
    (lists / f"test_list_{size}.txt").write_text(rows(range(num_train + 1, num_train + count + 1)))
  return root


def tfds(root, name, splits):
  """Writes a data set of the real TFDS builder in array_record. ``splits`` maps a name to examples,
  with images as paths.
  """
  from etils import epath
  import tensorflow_datasets
  from tensorflow_datasets.core import example_serializer, file_adapters, naming
  from tensorflow_datasets.core import splits as splits_lib
  from tensorflow_datasets.core import writer as writer_lib

  builder = tensorflow_datasets.builder(name, data_dir=str(root), file_format="array_record")
  folder = epath.Path(builder.data_path)
  folder.mkdir(parents=True, exist_ok=True)
  features, infos = builder.info.features, []
  for split, examples in splits.items():
    template = naming.ShardedFileTemplate(
      split=split, dataset_name=builder.name, data_dir=folder, filetype_suffix="array_record"
    )
    writer = writer_lib.Writer(
      serializer=example_serializer.ExampleSerializer(features.get_serialized_info()),
      filename_template=template,
      hash_salt=split,
      disable_shuffling=True,
      example_writer=writer_lib.ExampleWriter(file_format=file_adapters.FileFormat.ARRAY_RECORD),
    )
    for key, example in enumerate(examples):
      writer.write(key, features.encode_example(example))
    lengths, size = writer.finalize()
    infos.append(
      splits_lib.SplitInfo(
        name=split, shard_lengths=lengths, num_bytes=size, filename_template=template
      )
    )
  builder.info.set_splits(splits_lib.SplitDict(infos))
  builder.info.write_to_directory(folder)
  return root


def tfds_sop(root, num_train, num_test):
  """Writes Stanford Online Products by its TFDS builder; test ids follow the training ids."""
  images = root / "images"

  def examples(labels):
    for label in labels:
      for index in range(PER_CLASS):
        path = images / f"{label}_{index}.jpg"
        write(path, label, index)
        yield {"class_id": label, "super_class_id/num": 0, "super_class_id": 0, "image": str(path)}

  test = range(11318, 11318 + num_test)
  return tfds(
    root, "stanford_online_products", {"train": examples(range(num_train)), "test": examples(test)}
  )


def tfds_inaturalist(root, num_train, num_test):
  """Writes iNaturalist 2018 by its TFDS builder, with the lists of SmoothAP next to it."""
  inaturalist(root, num_train, num_test)
  # The builder's labels have no effect: the lists have the classes.
  examples = [
    {"id": path.stem, "label": 5, "supercategory": 1, "image": str(path)}
    for path in sorted(root.rglob("*.jpg"))
  ]
  return tfds(root, "i_naturalist2018", {"train": examples[::2], "validation": examples[1::2]})


def _config(source, root, **values):
  config = config_lib.default_config().data
  config.update(
    {"source": source, "root": str(root), "train_share": 0.5, "val_share": 0.25} | values
  )
  return config


def splits(source, root, **values):
  return datasets.make_splits(_config(source, root, **values))


def check_examples(source, label_of, tolerance):
  """Checks that every image has the pixels of its class and its number."""
  for i in range(len(source)):
    example = source[i]
    assert example.label == source.labels[i]
    assert isinstance(example.label, int)
    label, index = label_of(example)
    got = decoding.pixels(decoding.as_picture(example.image)).astype(int)
    assert np.abs(got - pixels(label, index)).max() <= tolerance


def classes(source):
  return set(source.labels.tolist())


WRITERS = {
  "sop": lambda root: sop(root, 8, 3),
  "inaturalist": lambda root: inaturalist(root, 8, 3),
  "vehicle_id": lambda root: vehicle_id(root, 8),
}
