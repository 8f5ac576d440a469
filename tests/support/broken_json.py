"""Provides files that are not JSON, and JSON of other shapes."""

import json

from hypothesis import strategies as st

# Not JSON, another encoding, too deep for the parser.
BROKEN = (b"", b"{", b"{}x", b"\xff\xfe{}", b"[" * 100_000, b"\0" * 50)
JSON = st.recursive(
  st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
  ),
  max_leaves=8,
)


@st.composite
def replaced(draw, good):
  """Returns a tree with another value in one place, or without it."""
  tree = json.loads(json.dumps(good))
  node, parent, key = tree, None, None
  while isinstance(node, (dict, list)) and node and (parent is None or draw(st.booleans())):
    parent, key = (
      node,
      draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))),
    )
    node = parent[key]
  if parent is None or draw(st.integers(0, 9)) == 0:
    return draw(JSON)
  if draw(st.booleans()):
    parent[key] = draw(JSON)
  else:
    del parent[key]
  return tree
