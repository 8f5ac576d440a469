#!/usr/bin/env python3
"""Finds private words for standard terms and long sentences in pages, docstrings and messages.

  python .ci/prose.py

It reads README.md, the pages of docs/ and the other Markdown files (outside code fences and
tables), and the docstrings, comments and texts of soprc_jax/, experiments/ and configs/. A finding
is a question: rewrite the sentence, or leave it where the word is meant literally. Exit status 1
if there are more findings than `MEANT`.
"""

import ast
from collections.abc import Iterator
import io
from pathlib import Path
import re
import sys
import tokenize

# Findings that were looked at and are meant literally.
MEANT = 30

# Pattern -> the standard term. Case is ignored.
TERMS = {
  r"(goes|go|going|went|gone) on (with|from|after|when|to|and|as)": "resume / continue",
  r"(is|are|was|were|be|been|and|still) told": "reported / raised / logged",
  r"tells? (it|that|the|how|what|which|of|where|when|a|an|speed|so)": "reports / says / prints",
  r"told (by|in|at|as|with|where|before|from|here|apart|of)": "reported / named",
  r"damaged": "corrupt",
  r"mend(s|ed|ing)?": "fix",
  r"made anew|anew": "again / recreated",
  r"of one's own|one's own|of your own": "custom / your",
  r"so many": "N / this many",
  r"look-alikes?": "hard negatives",
  r"pre-?emption": "preemption (fine in prose; say SIGTERM in messages)",
  r"beside (it|other|the|its|each|them|a|an|what)": "next to / alongside / versus",
  r"of somebody else": "from another user / untrusted",
  r"a hole": "a vulnerability",
  r"pictures?": "plot / figure / image (whichever it is)",
  r"(is|are) refused": "raises / is rejected",
  r"takes? (its|their|the) place": "replaces",
  r"whatever (it|they|the|is|their)": "(say which values)",
  r"at hand": "available / installed",
  r"by itself|by themselves": "separately / alone",
  r"(what|that) (it|they) (is|are|was|were) (made|asked|told|given)": "(name the thing)",
  r"holds? nothing|nothing holds?": "is empty",
  r"(a|the) rate of": "learning rate (if that is meant)",
  r"by val\b": "on the validation split",
  r"(pick|picked|chosen|best) (on|by) val\b": "on the validation split",
  r"a person": "the user",
  r"let go": "release / clear",
  r"stands? still": "does not change / blocks",
  r"in the way that": "as",
  r"for those who": "(name the case)",
}
MAX_WORDS = 38
_TERMS = [(re.compile(rf"\b(?:{term})\b", re.IGNORECASE), better) for term, better in TERMS.items()]
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Za-z`*\[(])|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
  """Yields first line number and text of each paragraph of a Markdown page."""
  fenced, block, start = False, list[str](), 1
  for number, line in enumerate([*text.splitlines(), ""], 1):
    if line.lstrip().startswith("```"):
      fenced, line = not fenced, ""
    elif fenced or line.lstrip().startswith(("|", "<", ">>>", "#", "$")):
      line = ""
    if line.strip():
      start = number if not block else start
      block.append(line)
    elif block:
      yield start, "\n".join(block)
      block = []


def texts(source: str) -> Iterator[tuple[int, str]]:
  """Yields line number and text of each docstring, string and comment of a Python file."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
      yield node.lineno, re.sub(r"(?m)^\s*(>>>|\.\.\.).*$", "", node.value)
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
      yield token.start[0], token.string.lstrip("# ")


def findings(path: Path) -> Iterator[str]:
  """Yields a line for each finding in a file."""
  content = path.read_text(encoding="utf-8")
  for start, prose in paragraphs(content) if path.suffix == ".md" else texts(content):
    bare = re.sub(r"`[^`]*`|\$[^$]*\$|https?://\S+", "X", prose)
    for pattern, better in _TERMS:
      for match in pattern.finditer(bare):
        line = start + bare[: match.start()].count("\n")
        yield f"{path}:{line}: {match[0].lower()!r} -> {better}"
    for sentence in _SENTENCE.split(bare):
      words = sentence.split()
      if len(words) > MAX_WORDS and "|" not in sentence:
        yield f"{path}:{start}: {len(words)} words: {' '.join(words[:9])} ..."


def main() -> int:
  """Prints the findings and returns the exit status."""
  root = Path(__file__).parents[1]
  pages = [
    path for path in (*root.glob("*.md"), *root.glob("docs/**/*.md")) if "_build" not in path.parts
  ]
  code = [
    path
    for name in ("soprc_jax", "experiments", "configs")
    for path in root.glob(f"{name}/**/*.py")
  ]
  found = [
    line
    for path in sorted(pages) + sorted(code)
    for line in findings(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
  ]
  print("\n".join([*found, f"{len(found)} findings, at most {MEANT} are meant"]))
  return int(len(found) > MEANT)


if __name__ == "__main__":
  sys.exit(main())
