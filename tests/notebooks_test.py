"""Tests that the notebooks of the documentation run to their end.

They are stored without outputs.
"""

import pathlib
import warnings

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[docs]'")
nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[docs]'")

_NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_two():
  assert [path.stem for path in _NOTEBOOKS] == ["estimator", "training"]


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
  notebook = nbformat.read(path, as_version=4)
  assert [
    cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")
  ] == []
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Jupyter's own warnings; an error in a cell still fails
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
  assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
  assert sum(output.get("name") == "stdout" for output in outputs) >= 2
