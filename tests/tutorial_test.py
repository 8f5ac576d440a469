"""Tests the commands of the tutorial on custom images, exactly as written.

They print what the page shows, except for the numbers.
"""

import doctest
import re
import shlex

import pytest
import runs

_TEXT = (runs.ROOT / "docs" / "tutorials" / "own_images.md").read_text()


def _shape(line):
  """Returns a line without its numbers and the time of day, which depend on the machine."""
  return re.sub(r"\d[\d.e-]*", "#", re.sub(r"^\d\d:\d\d:\d\d ", "", line.strip()))


def _commands():
  """Returns each command with the output that the page shows. Two commands of a block print into
  the text of the last one.
  """
  for block, printed in re.findall(r"```bash\n(.*?)```\n\n```text\n(.*?)```", _TEXT, re.S):
    yield block.splitlines(), printed.splitlines()


def test_each_program_is_there_with_its_output():
  programs = [shlex.split(command)[:2] for commands, _ in _commands() for command in commands]
  names = ("train", "evaluate", "report", "search", "embed", "search", "export")
  assert programs == [["soprc", name] for name in names]


@pytest.mark.slow
def test_commands_print_what_the_page_says(tmp_path):
  made = {}
  for example in doctest.DocTestParser().get_examples(_TEXT):
    exec(example.source, made)
  images = made["images"]
  for commands, expected in _commands():
    printed = []
    for command in commands:
      words = shlex.split(command.replace("IMAGES", str(images)).replace("runs/", f"{tmp_path}/"))
      done = runs.call("soprc_jax.cli", *words[1:], env=runs.environment())
      assert done.returncode == 0, done.stderr
      output = (
        (done.stdout + done.stderr).replace(str(images), "IMAGES").replace(f"{tmp_path}/", "runs/")
      )
      printed += [_shape(line) for line in output.splitlines()]
    missing = [line for line in expected if not _found(_shape(line), printed)]
    assert missing == [], "\n".join(printed)


def _found(line, printed):
  # The nearest images depend on the last bits of a training, so a table row is compared by its
  # form.
  if re.match(r"#\s+\S+", line):
    return any(re.match(r"#\s+\S+", other) for other in printed)
  return line in printed
