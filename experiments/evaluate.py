r"""Evaluates the model of a finished or running training: retrieval metrics of one split.

soprc evaluate --workdir=runs/glyphs [--split=test] [--checkpoint=best]

The config is that of the run. A --config, given with the same flags as in training, must agree with
it, except for keys like the place of the data. The metrics are printed and written to
WORKDIR/evaluation_SPLIT.json.

It is an error if the model was trained on classes of the split, or if the data of the run have
changed. --allow_seen_classes notes such classes in the file instead.

Each metric has its 95 % confidence interval for new classes. WORKDIR/evaluation_SPLIT.npz has the
result of each query: id, class, average precision, and rank of the first positive. With
--group_by=COLUMN, a column of the CSV of the images, the metrics are also given for each of its
values.

soprc evaluate --queries=queries.npy --gallery='shards/*.npy' --output=RESULTS \
    [--distractors='more/*.npy'] [--ks=1,10,100,1000] [--memory_gb=4] [--shard=I/N]

evaluates stored embeddings instead, in one pass over files of any size. The metrics are mAUPRC,
mAP@k and recall@k, exactly. --gallery is a file or a pattern of .npy files, or an .npz file of
soprc embed. Each .npy file has a .parquet or .csv file of the same name, with a column of ids and
one of labels. A query is left out of its gallery by its id. --distractors are positives of no query
and need no table. Where an image has several labels, give --label_separator and --min_jaccard, as
data.label_separator and data.min_jaccard of a config. Without them they are those of the run that
made the files, if soprc embed has noted them. The same command resumes. With --shard=I/N one of N
processes counts its share of the files. The last command, without --shard, adds the counts. It
writes RESULTS/evaluation.json, and the result of each query to evaluation.npz.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags, gallery

absl_flags.adopt_module_key_flags(flags)
_SPLIT = absl_flags.DEFINE_string(
  "split",
  "test",
  "Images to evaluate, each a query: train, val, test or all (VehicleID: also test_medium, "
  "test_small).",
)
_CHECKPOINT = absl_flags.DEFINE_enum(
  "checkpoint", "best", ["best", "newest"], "Checkpoint: best validation mAUPRC, or newest."
)

_ALLOW_SEEN = absl_flags.DEFINE_bool(
  "allow_seen_classes",
  False,
  "Evaluate also on classes that the model was trained on: a warning and a note in the results "
  "instead of an error.",
)
_GROUP_BY = absl_flags.DEFINE_string(
  "group_by", "", "Column of the CSV of the images; the metrics are also given by its values."
)
_QUERIES = absl_flags.DEFINE_string(
  "queries", None, "Stored embeddings that are the queries, instead of the model of a run."
)
_GALLERY = absl_flags.DEFINE_string(
  "gallery", None, "With --queries: file or pattern of the candidates, with ids and labels."
)
_DISTRACTORS = absl_flags.DEFINE_string(
  "distractors", None, "With --queries: file or pattern of candidates that are never a positive."
)
_OUTPUT = absl_flags.DEFINE_string(
  "output", None, "With --queries: folder of the counts and results."
)
_KS = absl_flags.DEFINE_list(
  "ks", ["1", "10", "100", "1000"], "With --queries: cut-offs of mAP@k and recall@k."
)
_MEMORY_GB = absl_flags.DEFINE_float(
  "memory_gb", 4.0, "With --queries: memory of this process in GiB.", lower_bound=0.0
)
_SHARD = absl_flags.DEFINE_string(
  "shard", None, "With --queries: I/N, count every N-th file of the gallery from file I on."
)
_LABEL_SEPARATOR = absl_flags.DEFINE_string(
  "label_separator",
  None,
  "With --queries: text between two labels of an image; '': one class.",
)
_MIN_JACCARD = absl_flags.DEFINE_float(
  "min_jaccard",
  0.0,
  "With --label_separator: smallest Jaccard index of relevant images; 0: one shared label.",
  lower_bound=0.0,
  upper_bound=1.0,
)
_EXAMPLE = "--queries=queries.npy --gallery='shards/*.npy' --output=RESULTS"
_OF_STORED = (
  "gallery",
  "distractors",
  "output",
  "ks",
  "memory_gb",
  "shard",
  "label_separator",
  "min_jaccard",
)


def main(argv: Sequence[str]) -> None:
  there = absl_flags.FLAGS
  if there["queries"].present:
    _evaluate_stored(argv)
    return
  for name in _OF_STORED:
    if there[name].present:
      flags.require(argv, _EXAMPLE, queries=None)
  run = flags.read(argv, several_processes=True, without_config="--workdir=runs/glyphs")
  from soprc_jax.metrics import per_query
  from soprc_jax.serving import network
  from soprc_jax.training import config as config_lib
  from soprc_jax.training import evaluation, parallel, workdir

  with flags.errors_as_messages():
    config = network.stored_config(run.workdir) if run.config is None else run.config
    parallel.check_equal("the config", config_lib.to_json(config))
    parallel.check_equal(
      "one of --workdir, --split, --checkpoint", f"{run.workdir} {_SPLIT.value} {_CHECKPOINT.value}"
    )
    values, queries = evaluation.evaluate_workdir(
      config,
      run.workdir,
      split=_SPLIT.value,
      newest=_CHECKPOINT.value == "newest",
      allow_seen_classes=_ALLOW_SEEN.value,
      group_by=_GROUP_BY.value,
    )
    path = run.workdir / f"evaluation_{_SPLIT.value}.json"
    if parallel.is_main():
      workdir.write_atomically(path, json.dumps(values, indent=2) + "\n")
      per_query.write(path.with_suffix(".npz"), queries)
  if not parallel.is_main():
    return
  print(flags.metrics_line(_SPLIT.value, values))
  if "groups" in values:
    print(_group_table(**values["groups"]))
  print(f"Written to {path}")


def _group_table(column: str, values: Mapping[str, Any]) -> str:
  """Returns a table of the metrics of `per_query.by_group`."""
  from soprc_jax._internal import text_table

  names = [name for name, value in next(iter(values.values())).items() if isinstance(value, float)]
  rows = [
    [
      text_table.cell(group or "(empty)"),
      f"{found['num_queries']:,}",
      f"{found['num_classes']:,}",
      *(f"{found[name]:.4f}{flags.interval(found['intervals'], name)}" for name in names),
    ]
    for group, found in values.items()
  ]
  return text_table.markdown([text_table.cell(column), "queries", "classes", *names], rows)


def _evaluate_stored(argv: Sequence[str]) -> None:
  flags.require(
    argv, _EXAMPLE, queries=_QUERIES.value, gallery=_GALLERY.value, output=_OUTPUT.value
  )
  others = ("config", "workdir", "split", "checkpoint", "allow_seen_classes", "group_by")
  with flags.errors_as_messages():
    for name in (*others, "distributed"):
      if absl_flags.FLAGS[name].present:
        raise ValueError(f"--queries and --{name} exclude each other: give one of them")
    if absl_flags.FLAGS["min_jaccard"].present and not _LABEL_SEPARATOR.value:
      raise ValueError("--min_jaccard needs --label_separator, e.g. --label_separator=';'")
  gallery.evaluate(
    queries=str(_QUERIES.value),
    gallery=str(_GALLERY.value),
    distractors=_DISTRACTORS.value,
    output=str(_OUTPUT.value),
    ks=_KS.value or [],
    memory_gb=float(_MEMORY_GB.value or 0.0),
    shard=_SHARD.value,
    label_separator=_LABEL_SEPARATOR.value,
    min_jaccard=float(_MIN_JACCARD.value or 0.0),
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
