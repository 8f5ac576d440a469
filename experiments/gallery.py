"""Evaluates embeddings in files, in bounded memory: the second mode of `experiments.evaluate`."""

from collections.abc import Sequence
import json
import math
from pathlib import Path

from experiments import flags

# The largest cut-off that fits an int32.
_LARGEST = 2**31 - 1


def evaluate(
  *,
  queries: str,
  gallery: str,
  distractors: str | None,
  output: str,
  ks: Sequence[str],
  memory_gb: float,
  shard: str | None,
  label_separator: str | None = None,
  min_jaccard: float = 0.0,
) -> None:
  """Counts in the shards of a gallery, and writes the metrics when all are counted.

  The arguments are the flags of `experiments.evaluate`.
  """
  from soprc_jax._internal import file_io
  from soprc_jax.metrics import per_query
  from soprc_jax.serving import shard_evaluation, shard_survey, shards
  from soprc_jax.training import workdir

  with flags.errors_as_messages():
    part = shards.part(shard, flag="--shard") if shard else (0, 1)
    cuts = _cut_offs(ks)
    if not math.isfinite(memory_gb):
      raise ValueError(f"--memory_gb={memory_gb} must be a finite number, e.g. --memory_gb=4")
    folder = file_io.given(output, name="--output")
    files = shard_survey.find(
      queries, gallery, distractors, label_separator=label_separator, min_jaccard=min_jaccard
    )
    counts = folder / "counts"
    file_io.make_folder(counts, name="--output")
    prepared = shard_survey.prepare(files)
    size, threads = shard_evaluation.plan(files, prepared, memory_gb)
    mine = files.gallery[part[0] :: part[1]]
    with flags.vectors_bar(sum(one.rows for one in mine)) as bar:
      shard_evaluation.count(
        files, prepared, counts, size=size, threads=threads, part=part, on_rows=bar.update
      )
    if shard:
      print(f"Counted {len(mine)} of {len(files.gallery)} shards. When all are, omit --shard.")
      return
    values, asked, at_k = shard_evaluation.summarise(files, prepared, counts, ks=cuts)
    if files.rule:
      values["label_separator"], values["min_jaccard"] = files.rule
    path = Path(folder / "evaluation.json")
    per_query.write(path.with_suffix(".npz"), asked, at_k)
    workdir.write_atomically(path, json.dumps(values, indent=2) + "\n")
  print(flags.metrics_line(f"{files.num_candidates:,} candidates", values))
  if values["num_excluded"]:
    print(f"{values['num_excluded']} candidates are the query itself (same id) and are left out.")
  print(f"Written to {path}")


def _cut_offs(ks: Sequence[str]) -> list[int]:
  found = [int(k) for k in ks if k.isdecimal() and len(k) <= len(str(_LARGEST))]
  wrong = len(found) < len(ks) or len(set(found)) < len(found)
  if wrong or not found or not 1 <= min(found) <= max(found) <= _LARGEST:
    raise ValueError(
      f"--ks={','.join(ks)} must be different integers from 1 to {_LARGEST}, e.g. --ks=1,10,100"
    )
  return found
