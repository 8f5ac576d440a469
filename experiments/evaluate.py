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
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

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


def main(argv: Sequence[str]) -> None:
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


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
