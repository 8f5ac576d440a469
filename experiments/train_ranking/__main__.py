r"""Trains rankers on LETOR files: SOPRC compared with the AP loss and listwise losses of rax.

soprc train-ranking --train=Fold1/train.txt --val=Fold1/vali.txt --test=Fold1/test.txt
--workdir=runs/ranking

A line of a file is a document: RELEVANCE qid:QUERY INDEX:VALUE ... # COMMENT. Files .npz with the
arrays features, relevance and group work too. It needs rax: pip install -e ".[ranking]".

Each document gets a score by a small network on standardized features. A batch has whole queries,
padded to a common length; none is cut. At each seed all methods start from the same weights and see
the same batches. The learning rate of a method is chosen from --rates by the mean validation MAP
over the seeds, and its model with the best validation MAP is tested. A document is relevant for AP
if its relevance is > 0; softmax and ApproxNDCG use the grades.

WORKDIR receives results.json (every value), table.md, and runs/ with each finished run. The same
command resumes where it stopped.
"""

from collections.abc import Sequence
import hashlib
import logging
from pathlib import Path
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("workdir")
_FILES = {
  name: absl_flags.DEFINE_string(name, None, f"File of the {what} queries, LETOR text or .npz.")
  for name, what in (("train", "training"), ("val", "validation"), ("test", "test"))
}
_METHODS = absl_flags.DEFINE_list(
  "methods",
  ["soprc", "ap", "softmax", "approx_ndcg"],
  "Methods; the first one is compared with the others.",
)
_SEEDS = absl_flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the weights and batches.")
_RATES = absl_flags.DEFINE_list("rates", ["0.001", "0.003", "0.01"], "Learning rates of Adam.")
_WIDTHS = absl_flags.DEFINE_list("widths", ["64", "64"], "Widths of the hidden layers.")
_STEPS = absl_flags.DEFINE_integer(
  "steps", 1000, "Steps of a run; there are ten validations.", lower_bound=10
)
_QUERIES = absl_flags.DEFINE_integer("queries", 16, "Queries in a batch.", lower_bound=2)
_EXAMPLE = "--train=train.txt --val=vali.txt --test=test.txt --workdir=runs/ranking"
_VALIDATIONS = 10


def main(argv: Sequence[str]) -> None:
  given = {name: str(flag.value or "") for name, flag in _FILES.items()}
  flags.require(argv, _EXAMPLE, **given)
  folder = flags.folder(argv, _EXAMPLE, "config.json")
  with flags.errors_as_messages():
    from experiments.train_ranking import ranking, ranking_losses, ranking_report
    from soprc_jax.data import letor
    from soprc_jax.training import workdir

    methods, settings = _methods(list(ranking_losses.LOSSES)), _settings()
    ranking_losses.rax()
    splits: dict[str, Any] = {}
    for name, path in given.items():
      width = splits["train"].features.shape[1] if splits else None
      splits[name] = letor.read(path, name=f"--{name}", num_features=width)
    described = "; ".join(ranking_report.describe(name, one) for name, one in splits.items())
    task = ranking.prepare(**splits)
    splits.clear()  # the raw features
    if settings["train"]["queries"] > len(task.drawn):
      raise ValueError(
        f"--queries={_QUERIES.value}, and only {len(task.drawn)} training queries have documents "
        "that differ in relevance: lower it"
      )
    about = {"data": f"{described}. {task.train.features.shape[1]} features."}
    config = _config(settings, given)
    workdir.claim(folder, config, flags.WRITES[workdir.CONFIG])
    flags.prepare_jax()
    logging.getLogger("soprc_jax.train_ranking").info("%s", about["data"])
    rows = ranking_report.run_all(config, task, folder, methods)
    print(ranking_report.write(folder, config, task, rows, about))
  print(f"Written to {folder}: results.json, table.md")


def _methods(known: Sequence[str]) -> list[str]:
  found: list[str] = _METHODS.value
  if not found or len(set(found)) < len(found) or not set(found) <= set(known):
    raise ValueError(
      f"--methods must be different names of {', '.join(known)}; got {','.join(found)}"
    )
  return found


def _settings() -> dict[str, Any]:
  """Returns the part of the config that the flags give.

  Raises:
    ValueError: a flag has a wrong value.
  """
  if _STEPS.value % _VALIDATIONS:
    raise ValueError(f"--steps must be a multiple of {_VALIDATIONS}, got {_STEPS.value}")
  return {
    "seeds": _numbers("seeds", _SEEDS.value, int, 0, 2**31 - 1),
    "rates": _numbers("rates", _RATES.value, float, 1e-12, 1e12),
    "model": {"widths": _numbers("widths", _WIDTHS.value, int, 1, 2**14, different=False)},
    "train": {"steps": _STEPS.value, "queries": _QUERIES.value},
    "eval": {"every": _STEPS.value // _VALIDATIONS},
    "optim": {
      "name": "adam",
      "schedule": "cosine",
      "ramp_steps": 0,
      "momentum": 0.9,
      "weight_decay": 0.0,
    },
  }


def _numbers(
  name: str, texts: Sequence[str], kind: type, low: float, high: float, *, different: bool = True
) -> tuple[Any, ...]:
  """Returns a list of numbers of a flag.

  Raises:
    ValueError: it is empty, a number is wrong or out of range, or one occurs twice.
  """
  try:
    found = tuple(kind(text) for text in texts)
  except ValueError:
    found = ()
  if (
    not found
    or not all(low <= one <= high for one in found)
    or (different and len(set(found)) < len(found))
  ):
    what = "different " if different else ""
    raise ValueError(
      f"--{name} must be {what}{'integers' if kind is int else 'numbers'} from {low:g} to "
      f"{high:g}, separated by commas; got {','.join(texts)!r}"
    )
  return found


def _config(settings: dict[str, Any], files: dict[str, str]) -> Any:
  """Returns the config, which has the digest of each file: other data need another folder.

  Raises:
    ValueError: two files have the same content.
  """
  from ml_collections import ConfigDict

  digests: dict[str, str] = {}
  for name, path in files.items():
    with Path(path).expanduser().open("rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest in digests.values():
      same = next(other for other, one in digests.items() if one == digest)
      raise ValueError(f"--{same} and --{name} have the same content: give different queries")
    digests[name] = digest
  return ConfigDict({**settings, "data": digests})


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
