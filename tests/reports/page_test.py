"""Tests the templates of the reports, and the source of their tables."""

import os

import jinja2
import pages
import pytest

from soprc_jax.reports import page


class TestTemplates:
  def test_text_and_attributes_are_escaped(self):
    attack = """"'><script>"""
    assert pages.Page(page.markup('<a href="{}">{}</a>', attack, attack)).elements == [
      ("a", {"href": attack})
    ]
    found = pages.Page(
      page.table(
        attack, ["", attack], [[attack, attack], [page.name(attack), page.name(attack, 5)]]
      )
    )
    assert found.text == " ".join([attack] * 5) + " \"'..."
    assert not {tag for tag, _ in found.elements} & {"a", "script"}
    assert found.all("span") == [{"class": "name"}, {"class": "name", "title": attack}]
    assert found.all("table") == [{"aria-label": attack}]

  def test_elements_are_not_escaped_twice(self):
    assert page.markup("<p>{}</p>", page.markup("<b>{}</b>", "x")) == "<p><b>x</b></p>"
    assert "<td><b>&lt;</b></td>" in page.table(
      "t", ["", ""], [["x", page.markup("<b>{}</b>", "<")]]
    )

  def test_what_no_document_may_hold_is_shown(self):
    name = os.fsdecode(b"\xff\x00") + "é"
    assert page.markup("{}", name).encode() == "\\udcff\\x00é".encode()
    assert page.table(name, [], []).encode().count("\\udcff\\x00é".encode()) == 3

  def test_a_template_without_its_values_is_an_error(self):
    with pytest.raises(jinja2.UndefinedError, match="'rows' is undefined"):
      page.render("table.html", caption="", header=["x"])


class TestThumbnails:
  def test_names_lose_their_middle(self):
    assert page.shorten("a" * 50 + "z", 20) == "a" * 12 + "..." + "a" * 4 + "z"
    assert page.shorten("short", 20) == "short"
