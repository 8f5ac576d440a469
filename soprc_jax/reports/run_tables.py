"""What a run has reached, with the paper's numbers beside it."""

from typing import Any

from soprc_jax.reports import page, paper, reading
from soprc_jax.reports.markup import Markup, join, paragraph, tag
from soprc_jax.training import classes, methods

_COUNTS = {
  "num_queries": "queries",
  "num_skipped": "queries without a positive, skipped",
  "num_broken": "broken images, left out",
  "num_repeats": "random galleries",
}


def phases(run: reading.Run) -> str:
  """Steps of the run in words."""
  config = run.config
  warmup = f"{config.warmup.steps:,} steps of warm-up and " if config.warmup.steps else ""
  return f"{warmup}{config.train.steps:,} steps"


def headline(run: reading.Run) -> Markup:
  """The figures that a reader looks for first."""
  test, val = run.results["test"], run.results["val"]
  shown = [("test mAUPRC", f"{test['mAUPRC']:.4f}")]
  shown += [(f"test {name}", f"{value:.4f}") for name, value in test.items() if name.startswith("recall@")][:2]
  shown += [("val mAUPRC", f"{val['mAUPRC']:.4f}")] if "mAUPRC" in val else []
  if "num_queries" in test:
    shown.append(("test queries", f"{test['num_queries']:,}"))
  return page.cards(shown)


def section(run: reading.Run) -> Markup:
  """All metrics of all splits, then the paper's table."""
  found = run.results
  names = reading.splits(found)
  metrics = list(dict.fromkeys(key for name in names for key, value in found[name].items() if isinstance(value, float)))
  counts = [key for key in _COUNTS if any(key in found[name] for name in names)]
  rows = [[key, *(page.number(found[name].get(key)) for name in names)] for key in metrics]
  rows += [[_COUNTS[key], *(page.number(found[name].get(key)) for name in names)] for key in counts]
  parts = [
    paragraph(_which(run)),
    *([_seen(found["seen_classes"])] if "seen_classes" in found else []),
    page.table("Every metric of every evaluation (values from 0 to 1)", ["metric", *names], rows),
    *_beyond(found, names),
  ]
  return join([*parts, tag("h3", "Beside the paper"), beside(run)])


def beside(run: reading.Run) -> Markup:
  """The paper's numbers, with those of the run in the first row."""
  config = run.config
  if not paper.has(config.data.source):
    return join([no_numbers(config.data.source), _context(run)])
  parts = []
  for name in reading.splits(run.results):
    table = paper.reported(config.data.source, trainval=config.data.trainval, split=name)
    if table is not None:
      parts.append(_table(table, run, name))
  return join(parts)


def no_numbers(source: str) -> Markup:
  """Says that the paper has not used these data."""
  return paragraph(
    f"The paper has no numbers for these data (data.source={source}). For the scale only, here are its numbers for Stanford Online Products: other images, "
    "another network and budget, so that they cannot be compared with this result."
  )


def _context(run: reading.Run) -> Markup:
  table = paper.reported("sop", trainval=False)
  assert table is not None
  return _table(table, run, "test", compares=False)


def _table(table: paper.Reported, run: reading.Run, split: str, *, compares: bool = True) -> Markup:
  own = run.config.loss.name
  label = methods.label(own)
  values = run.results[split]
  mine = f"this run: {label} on {run.config.data.source}, {split}"
  rows: list[list[Any]] = [[page.name(mine), *(_percent(values.get(metric)) for metric in table.metrics)]]
  for method, reported in table.rows.items():
    same = compares and method == own
    rows.append(
      [
        f"paper: {methods.label(method)}{' (the same loss)' if same else ''}",
        *(page.number(value, 2) for value in reported),
      ]
    )
  marked = [0] + [i for i, method in enumerate(table.rows, start=1) if compares and method == own]
  note = [paragraph(table.note, class_="note")] if table.note else []
  missing = [metric for metric in table.metrics if metric not in values]
  if missing:
    note.append(paragraph(f"Not computed by this run (eval.ks): {', '.join(missing)}.", class_="note"))
  return join(
    [
      page.table(
        f"The paper's results in percent (Table 1 and its appendix): {table.title}",
        ["", *map(_title, table.metrics)],
        rows,
        own=marked,
      ),
      *note,
    ]
  )


def _title(metric: str) -> Markup:
  """A metric's name that may break after its @, so that the table fits a phone."""
  name, at, k = metric.partition("@")
  return join([name + at, tag("wbr"), k]) if at else join([name])


def _percent(value: float | None) -> page.Cell:
  return page.number(None if value is None else 100.0 * value, 2)


def _which(run: reading.Run) -> str:
  found, config = run.results, run.config
  step = found.get("tested_step", found["steps"])
  if config.data.trainval:
    return f"Tested: the network of step {step:,}, the last one; the classes of val were trained on (data.trainval), so there is no val."
  best = "the last one" if not found["val"] else "the best on val"
  unseen = "" if "seen_classes" in found else ": all queries are of classes not seen in training"
  return f"Tested: the network of step {step:,} of {found['steps']:,}, {best}. No class is in two splits{unseen}."


def _seen(found: dict[str, Any]) -> Markup:
  return paragraph(
    f"Not a test of unseen classes: {classes.sentence(found)}. The run began with --allow_seen_classes, from a network "
    "that was trained on them (model.init_from).",
    class_="warning",
  )


def _beyond(found: dict[str, Any], names: list[str]) -> list[Markup]:
  """Names the recalls that say nothing, the gallery being smaller than k."""
  beyond = {name: found[name].get("ks_beyond_gallery") for name in names}
  return [
    paragraph(
      f"{name}: the gallery is smaller than k = {', '.join(map(str, ks))}, so that recall is 1 wherever a positive exists.",
      class_="note",
    )
    for name, ks in beyond.items()
    if ks
  ]
