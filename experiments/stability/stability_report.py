"""Writes the tables of the stability study, with verdicts on the paper's claims.

Every verdict is computed from the numbers.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.stability import stability, stability_slopes, stability_sweeps
from experiments.stability.stability_slopes import Compared, Estimate, Results
from experiments.stability.stability_sweeps import CONSTANT, THEOREM, Sweep
from soprc_jax._internal import text_table

LABELS = {"epsilon_positive": "eps+", "epsilon_negative": "eps-", "gap": "gap"}
AGREES, DISAGREES, OPEN = "agrees", "does not agree", "not resolved"
# Falls of the training risk at which algorithms are compared.
_SAME_RATE = "the same rate"
_FALLS = (0.1, 0.15, 0.2, 0.25)
# (less stable, more stable) by the paper; the last pair differs only in v and in the prior.
_PAIRS = (
  ("SOPRC without v", "SOPRC"),
  ("AP loss", "SOPRC"),
  ("AP loss", stability_sweeps.SELF_WEIGHT),
)


class Claim(NamedTuple):
  """A claim of the paper, the measurement, and whether they agree."""

  paper: str
  measured: str
  verdict: str


def markdown(sweeps: Sequence[Sweep], results: Results, effort: stability_sweeps.Effort) -> str:
  """Returns all tables whose sweeps were measured."""
  parts = [
    f"{effort.repetitions} repetitions, {effort.replaced} positives and {effort.replaced} "
    f"negatives replaced in each, one at a time; seed {effort.seed}. Slopes of logarithms ± "
    "standard errors, by least squares; - if a mean is not positive. Gap and training risk are "
    "those of Eq. 4 with the surrogates, but in Theorem 1 the gap is that of Eq. 6. SOPRC has the "
    "same prior, tau1 and tau2.",
    *_slope_tables(sweeps, results),
    *_comparisons(sweeps, results),
    _table("The paper and the measurement", ("the paper", "measured", ""), claims(sweeps, results)),
  ]
  return "\n\n".join(parts) + "\n"


def claims(sweeps: Sequence[Sweep], results: Results) -> list[Claim]:
  """Returns the verdicts on Theorem 1, Theorem 2 and the purpose of v.

  Only claims whose sweeps were measured are included.
  """
  return [*_theorem1(sweeps, results), *_theorem2(sweeps, results), *_more_stable(sweeps, results)]


def _theorem1(sweeps: Sequence[Sweep], results: Results) -> Iterator[Claim]:
  found = stability_slopes.theorem1(stability_sweeps.settings_of(sweeps), results)
  measured = (
    f"holds in {found.points - len(found.broken)} of {found.points} points; the gap is "
    f"{found.median:.2g} of the bound in the median, {found.largest:.2g} at most"
  )
  if found.broken:
    measured += f"; first violated in {found.broken[0]}"
  yield Claim(
    "Theorem 1: gap of Eq. 6 <= G (n+ eps+ + n- eps-)",
    measured,
    DISAGREES if found.broken else AGREES,
  )


def _theorem2(sweeps: Sequence[Sweep], results: Results) -> Iterator[Claim]:
  for sweep in _of(sweeps, THEOREM):
    if sweep.algorithm != "SOPRC":
      continue
    for measure, bounds in stability_slopes.THEOREM_BOUNDS.items():
      if sweep.quantity not in bounds:
        continue
      bound, found = bounds[sweep.quantity], stability_slopes.slopes(sweep, results, measure)
      yield Claim(
        f"Theorem 2: {LABELS[measure]} in {sweep.quantity}: slope {_bound(bound)}",
        f"{_shown(found.all)} over {_range(sweep)}; {_shown(found.last)} between the last two",
        _verdict(stability_slopes.agrees(found.all, bound)),
      )


def _more_stable(sweeps: Sequence[Sweep], results: Results) -> Iterator[Claim]:
  """Yields the claims that the other algorithms have a larger eps+ than SOPRC.

  By Sec. 3, v makes the algorithm more stable, and the AP loss is less stable, above all against a
  changed positive.
  """
  for conditions in stability_sweeps.CONDITIONS:
    for algorithm, reference in _PAIRS:
      compared = list(_compared(sweeps, results, conditions, reference))
      same = [(at, found) for at, found in compared if at == _SAME_RATE]
      fallen = [(at, found) for at, found in compared if at != _SAME_RATE]
      for when, chosen in (
        ("at the same rate", same),
        ("where the risk has fallen equally", fallen),
      ):
        ratios = [
          (at, found[algorithm].ratios["epsilon_positive"])
          for at, found in chosen
          if algorithm in found
        ]
        known = [(at, ratio) for at, ratio in ratios if ratio is not None]
        if known:
          yield Claim(
            f"{algorithm} is less stable than {reference} ({conditions}, {when})",
            "ratio of eps+: " + ", ".join(f"{_times(ratio)} ({at})" for at, ratio in known),
            _together([larger(ratio) for _, ratio in known]),
          )


def _together(verdicts: Sequence[str]) -> str:
  """Returns the verdict of all that are resolved.

  It is `OPEN` if they contradict each other, or none is resolved.
  """
  resolved = {verdict for verdict in verdicts if verdict != OPEN}
  return resolved.pop() if len(resolved) == 1 else OPEN


def larger(ratio: Estimate) -> str:
  """Returns whether a ratio is above 1 by more than two standard errors, below it, or neither.

  >>> larger(Estimate(1.3, 0.1)), larger(Estimate(0.7, 0.1)), larger(Estimate(1.1, 0.1))
  ('agrees', 'does not agree', 'not resolved')
  """
  if abs(ratio.value - 1) <= 2 * ratio.error:
    return OPEN
  return AGREES if ratio.value > 1 else DISAGREES


def _slope_tables(sweeps: Sequence[Sweep], results: Results) -> Iterator[str]:
  for conditions in stability_sweeps.CONDITIONS:
    chosen = [sweep for sweep in _of(sweeps, conditions) if sweep.quantity != "rate"]
    if not chosen:
      continue
    algorithms = [
      name for name in stability.ALGORITHMS if any(sweep.algorithm == name for sweep in chosen)
    ]
    rows = []
    for quantity in dict.fromkeys(sweep.quantity for sweep in chosen):
      by_algorithm = {sweep.algorithm: sweep for sweep in chosen if sweep.quantity == quantity}
      where = _range(next(iter(by_algorithm.values())))
      for measure, label in LABELS.items():
        found = {
          name: stability_slopes.slopes(sweep, results, measure).all
          if len(sweep.points) > 1
          else None
          for name, sweep in by_algorithm.items()
        }
        row = [
          f"{quantity} ({where})",
          label,
          *(_shown(found[name]) if name in found else "" for name in algorithms),
        ]
        if conditions == THEOREM:
          bound = stability_slopes.THEOREM_BOUNDS.get(measure, {}).get(quantity)
          row.insert(2, "" if bound is None else _bound(bound))
        rows.append(row)
    heads = ["slope in", "of", *(["Theorem 2"] if conditions == THEOREM else []), *algorithms]
    yield _table(_title(chosen[0]), heads, rows)
    if conditions == THEOREM:
      yield _exponent(chosen[0], results)
  yield from _by_rate(sweeps, results)


def _by_rate(sweeps: Sequence[Sweep], results: Results) -> Iterator[str]:
  """Yields slopes in T at each C: the exponent of Theorem 2 grows with C."""
  rows = []
  for sweep in _of(sweeps, THEOREM):
    for point in sweep.points if sweep.quantity == "rate" else ():
      setting = point.setting
      steps = tuple(
        stability_sweeps.Point(last, setting, at) for at, last in enumerate(setting.steps)
      )
      by_steps = Sweep(THEOREM, "T", sweep.algorithm, steps)
      found = [stability_slopes.slopes(by_steps, results, measure).all for measure in LABELS]
      rows.append([sweep.algorithm, f"{point.value:g}", *map(_shown, found)])
  if rows:
    yield _table("Slopes in T by C, eta_t = C / t", ("", "C", *LABELS.values()), rows)


def _exponent(sweep: Sweep, results: Results) -> str:
  setting = sweep.points[0].setting
  found = stability_slopes.exponent(setting, results[stability_sweeps.name(setting)])
  return (
    f"The theorem's exponent: L is at least about {found.smoothness:.0f} ({sweep.algorithm}), so "
    "lambda = L C (1 + sqrt(1 - beta^2 + beta)) is at least about "
    f"{found.constant:.0f} and lambda / (lambda + 1) at least {found.value:.3f}: hardly less than "
    "T n+ / N+, the expected number of draws of an example."
  )


def _comparisons(sweeps: Sequence[Sweep], results: Results) -> Iterator[str]:
  for conditions in stability_sweeps.CONDITIONS:
    rows = []
    for when, compared in _compared(sweeps, results, conditions, "SOPRC"):
      for algorithm, found in compared.items():
        values = [_small(found.values[measure]) for measure in LABELS]
        ratios = [
          "" if algorithm == "SOPRC" else _times(found.ratios[measure]) for measure in LABELS
        ]
        rows.append(
          [
            when,
            algorithm,
            f"{found.fall:.3f}",
            *(f"{v} {f'({r})' if r else ''}".strip() for v, r in zip(values, ratios)),
          ]
        )
    if rows:
      heads = (
        "at",
        "",
        "fall of the training risk",
        *(f"{label} (ratio to SOPRC)" for label in LABELS.values()),
      )
      yield _table(f"Algorithms compared, {conditions}, at the last T", heads, rows)


def _compared(
  sweeps: Sequence[Sweep], results: Results, conditions: str, reference: str
) -> Iterator[tuple[str, dict[str, Compared]]]:
  """Yields the algorithms at the same learning rate, and where each has learned equally much."""
  last = {
    sweep.algorithm: sweep.points[-1] for sweep in _of(sweeps, conditions) if sweep.quantity == "T"
  }
  if reference in last:
    yield _SAME_RATE, stability_slopes.at_same_rate(last, results, reference=reference)
  by_rate = {
    sweep.algorithm: sweep for sweep in _of(sweeps, conditions) if sweep.quantity == "rate"
  }
  for fall in _FALLS if reference in by_rate else ():
    compared = stability_slopes.at_equal_fall(by_rate, results, fall, reference=reference)
    if all(found.values["epsilon_positive"] is not None for found in compared.values()):
      yield f"fallen by {fall:g}", compared


def _of(sweeps: Sequence[Sweep], conditions: str) -> list[Sweep]:
  return [sweep for sweep in sweeps if sweep.conditions == conditions]


def _title(sweep: Sweep) -> str:
  setting = sweep.points[-1].setting
  if sweep.conditions == CONSTANT:
    return f"Slopes at a constant rate, eta = {setting.rate:g}"
  return (
    f"Slopes under the conditions of Theorem 2: eta_t = {setting.rate:g} / t, beta = 1 / n+, "
    "T <= N+"
  )


def _range(sweep: Sweep) -> str:
  return f"{sweep.points[0].value:g} to {sweep.points[-1].value:g}"


def _bound(bound: float) -> str:
  return f"at most {bound:g}" if bound == int(bound) and bound <= 0 else f"below {bound:g}"


def _verdict(holds: bool | None) -> str:
  return OPEN if holds is None else AGREES if holds else DISAGREES


def _shown(estimate: Estimate | None) -> str:
  return "-" if estimate is None else str(estimate)


def _small(estimate: Estimate | None) -> str:
  return "-" if estimate is None else f"{estimate.value:.4f} ± {estimate.error:.4f}"


def _times(ratio: Estimate | None) -> str:
  return "-" if ratio is None else f"{ratio.value:.2f} ± {ratio.error:.2f}"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  return f"**{title}**\n\n{text_table.markdown(heads, rows)}"
