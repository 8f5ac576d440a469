"""Parses an HTML page, and provides names that would break one."""

import html.parser

# Names of classes and files can be any text.
NAMES = (
  "<script>alert(1)<",
  '"><img src=x onerror=alert(1)>',
  "Äpfel & Birnen",
  "日本語",
  "عربي",
  "a" * 120,
  "it's",
)


class Page(html.parser.HTMLParser):
  """Collects the elements and the text of a page; an element that is not closed is an error."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.texts, self._open = [], [], []
    self.feed(text)
    assert self._open == []

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in ("meta", "img"):
      self._open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if self._open and self._open[-1] != "style":
      self.texts.append(data)

  @property
  def text(self):
    return " ".join(" ".join(self.texts).split())

  def all(self, name):
    return [attributes for tag, attributes in self.elements if tag == name]
