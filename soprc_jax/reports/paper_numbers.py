"""Lists the paper's results: Table 1 and the full tables of its appendix, in percent."""

from collections.abc import Mapping
from typing import NamedTuple

Rows = Mapping[str, tuple[float, ...]]

_SOP: Rows = {
  "contrastive": (57.73, 77.60, 89.31, 95.54, 98.65),
  "triplet": (58.07, 78.34, 90.50, 96.20, 98.88),
  "multi_similarity": (60.10, 79.64, 90.38, 95.93, 98.72),
  "xbm": (61.29, 80.66, 91.08, 96.04, 98.55),
  "smooth_ap": (61.65, 81.13, 92.02, 96.69, 98.91),
  "listwise_ap": (60.74, 80.52, 91.35, 96.46, 98.80),
  "fast_ap": (57.10, 77.30, 89.61, 95.74, 98.72),
  "auroc": (55.80, 77.32, 89.64, 95.77, 98.76),
  "blackbox": (59.74, 79.48, 90.74, 96.16, 98.74),
  "soprc": (62.75, 81.91, 92.50, 96.97, 98.96),
}
_SOP_TRAINVAL: Rows = {
  "triplet": (58.34, 78.61, 90.73, 96.33, 98.90),
  "smooth_ap": (61.96, 81.18, 92.10, 96.70, 98.97),
  "listwise_ap": (61.29, 80.74, 91.59, 96.58, 98.89),
  "fast_ap": (57.39, 77.56, 89.79, 95.88, 98.69),
  "auroc": (55.97, 77.42, 89.65, 95.83, 98.72),
  "soprc": (63.27, 82.15, 92.69, 97.11, 99.02),
}
_INATURALIST: Rows = {
  "contrastive": (27.99, 54.19, 71.12, 82.77, 86.94),
  "triplet": (30.59, 60.53, 77.62, 88.20, 91.72),
  "multi_similarity": (30.28, 63.39, 78.50, 88.07, 91.40),
  "xbm": (27.46, 59.12, 75.18, 85.93, 89.72),
  "smooth_ap": (33.92, 66.13, 80.93, 89.71, 92.67),
  "listwise_ap": (33.51, 64.86, 79.79, 89.07, 92.20),
  "fast_ap": (31.02, 56.64, 73.57, 84.65, 88.49),
  "auroc": (27.24, 60.88, 77.76, 88.39, 91.85),
  "blackbox": (29.28, 56.88, 74.10, 85.41, 89.42),
  "soprc": (36.16, 68.22, 82.86, 91.02, 93.71),
}
_INATURALIST_TRAINVAL: Rows = {
  "triplet": (31.49, 61.10, 77.97, 88.47, 91.95),
  "smooth_ap": (34.89, 66.79, 81.55, 90.13, 92.95),
  "listwise_ap": (34.55, 65.65, 80.63, 89.51, 92.52),
  "fast_ap": (32.14, 57.84, 74.59, 85.27, 88.99),
  "auroc": (26.08, 58.70, 76.13, 87.33, 91.05),
  "soprc": (37.31, 69.23, 83.41, 91.29, 93.81),
}
_VEHICLE_ID: Rows = {
  "contrastive": (77.74, 92.08, 92.08, 72.33, 90.15, 95.40, 67.26, 87.46, 94.60),
  "triplet": (80.27, 94.18, 97.54, 75.58, 92.10, 96.20, 70.99, 90.09, 95.54),
  "multi_similarity": (78.83, 93.05, 97.00, 74.30, 91.46, 96.06, 69.15, 88.82, 95.06),
  "xbm": (77.45, 94.83, 96.94, 73.77, 93.63, 96.01, 71.24, 92.78, 95.83),
  "smooth_ap": (80.39, 94.36, 97.44, 76.28, 92.98, 96.42, 72.28, 91.31, 96.05),
  "listwise_ap": (81.17, 94.64, 97.43, 76.95, 92.74, 96.45, 72.72, 91.38, 96.10),
  "fast_ap": (80.67, 93.67, 97.10, 75.73, 91.58, 96.29, 70.82, 89.42, 95.38),
  "auroc": (68.27, 88.31, 95.26, 63.41, 85.57, 93.42, 58.12, 81.73, 91.92),
  "blackbox": (80.00, 93.72, 97.15, 75.46, 91.84, 96.26, 70.92, 90.14, 95.52),
  "soprc": (83.11, 95.41, 97.69, 79.00, 93.67, 96.68, 74.92, 92.56, 96.43),
}
_VEHICLE_ID_TRAINVAL: Rows = {
  "triplet": (80.73, 94.01, 97.41, 75.48, 92.14, 96.28, 70.75, 89.65, 95.53),
  "smooth_ap": (80.74, 94.39, 97.34, 76.76, 92.90, 96.36, 72.65, 91.49, 96.06),
  "listwise_ap": (81.59, 94.69, 97.43, 77.36, 93.15, 96.46, 73.20, 91.74, 96.14),
  "fast_ap": (81.04, 93.35, 97.35, 75.98, 91.58, 96.01, 70.95, 89.39, 95.48),
  "auroc": (68.39, 88.34, 95.43, 63.55, 85.82, 93.42, 58.25, 81.81, 91.92),
  "soprc": (83.70, 95.41, 97.72, 79.84, 93.80, 96.77, 75.56, 92.83, 96.48),
}

_SOURCES = {
  "sop": "sop",
  "tfds_sop": "sop",
  "inaturalist": "inaturalist",
  "tfds_inaturalist": "inaturalist",
  "vehicle_id": "vehicle_id",
}
_NAMES = {
  "sop": "Stanford Online Products",
  "inaturalist": "iNaturalist 2018",
  "vehicle_id": "PKU VehicleID",
}
_KS = {"sop": (1, 10, 100, 1000), "inaturalist": (1, 4, 16, 32), "vehicle_id": (1, 5)}
_ROWS = {
  ("sop", False): _SOP,
  ("sop", True): _SOP_TRAINVAL,
  ("inaturalist", False): _INATURALIST,
  ("inaturalist", True): _INATURALIST_TRAINVAL,
  ("vehicle_id", False): _VEHICLE_ID,
  ("vehicle_id", True): _VEHICLE_ID_TRAINVAL,
}
# First column of each test list in VehicleID's nine columns: small, medium, large.
_VEHICLE_ID_COLUMNS = {"test_small": 0, "test_medium": 3, "test": 6}
ERRATUM_11 = (
  "The paper has two values for its method on the large list of VehicleID: 74.92 / 92.56 / 96.43 "
  "in Table 1, which are shown here, and 74.95 / 92.50 / 96.44 in the appendix (erratum 11)."
)


class Reported(NamedTuple):
  """Holds one table of the paper.

  Attributes:
    title: data, test list and training split.
    metrics: names as in ``results.json``, one per column.
    rows: key of `soprc_jax.training.methods.METHODS` -> percentages.
    note: a note for the reader; may be empty.
  """

  title: str
  metrics: tuple[str, ...]
  rows: Rows
  note: str


def has(source: str) -> bool:
  """Returns whether the paper has results for ``config.data.source``."""
  return source in _SOURCES


def reported(source: str, *, trainval: bool, split: str = "test") -> Reported | None:
  """Returns the paper's table for a data source and a split; None if there is none.

  Args:
    source: ``config.data.source``.
    trainval: whether the model was trained on train and val.
    split: name of the split in ``results.json``.

  >>> reported("sop", trainval=False).rows["soprc"][0]
  62.75
  """
  data = _SOURCES.get(source)
  if data is None or split not in (_VEHICLE_ID_COLUMNS if data == "vehicle_id" else ("test",)):
    return None
  rows, metrics = _ROWS[data, trainval], ("mAUPRC", *(f"recall@{k}" for k in _KS[data]))
  title, note = f"{_NAMES[data]}, trained on {'train and val' if trainval else 'train'}", ""
  if data == "vehicle_id":
    first = _VEHICLE_ID_COLUMNS[split]
    rows = {method: values[first : first + len(metrics)] for method, values in rows.items()}
    title += f", {'large' if split == 'test' else split.removeprefix('test_')} test list"
    note = ERRATUM_11 if split == "test" and not trainval else ""
  return Reported(title, metrics, rows, note)
