"""Tests that GitHub, Zotero and cffconvert can read CITATION.cff, and that it has this version."""

import pathlib

import yaml

import soprc_jax

_ROOT = pathlib.Path(__file__).parents[1]
_CITATION = yaml.safe_load((_ROOT / "CITATION.cff").read_text())


def test_required_keys():
  assert _CITATION["cff-version"] == "1.2.0"
  assert {"message", "title", "authors", "version", "license"} <= _CITATION.keys()
  paper = _CITATION["preferred-citation"]
  assert {"type", "title", "authors", "year"} <= paper.keys()
  for author in paper["authors"]:
    assert author.keys() == {"family-names", "given-names"}


def test_version_is_that_of_the_package():
  assert _CITATION["version"] == soprc_jax.__version__


def test_the_paper_is_the_one_that_the_readme_names():
  paper = _CITATION["preferred-citation"]
  (line,) = [
    line
    for line in (_ROOT / "README.md").read_text().splitlines()
    if line.startswith("The paper: ")
  ]
  names = ", ".join(author["family-names"] for author in paper["authors"])
  assert line == f"The paper: {names}, *{paper['title']}*, NeurIPS {paper['year']}."
