"""Tests configs from outside with every key and every kind of value.

A value is accepted, or a message names its key. Nothing else is raised.
"""

import copy
import json
import pathlib
import re
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
from ml_collections import config_dict
import pytest
import runs

from experiments import flags
from experiments.binary import binary_config
from experiments.compare import plans
from soprc_jax._internal import strings
from soprc_jax.training import config as config_lib
from soprc_jax.training import config_key

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = {"retrieval": config_lib, "binary": binary_config}
DEFAULTS = {name: module.default_config().to_dict() for name, module in CONFIGS.items()}
FILLED = {
  name: module.resolve(module.default_config()).to_dict() for name, module in CONFIGS.items()
}
# Values of each wrong type and of each wrong size.
WRONG = ("x", None, True, -2.5, 10**400, ("a",), {"a": 1})


def _keys(tree, prefix=""):
  """Returns every dotted key, including groups."""
  for key, value in tree.items():
    yield prefix + key
    if isinstance(value, dict):
      yield from _keys(value, f"{prefix}{key}.")


def _changed(name, changes):
  """Returns the default config with other values, of any types."""
  tree = copy.deepcopy(DEFAULTS[name])
  for key, value in changes.items():
    *groups, last = key.split(".")
    node = tree
    for group in groups:
      node = node.get(group)
      if not isinstance(node, dict):
        return None  # a group that an earlier change has replaced
    node[last] = value
  return config_dict.ConfigDict(tree)


def _tried(function, *args):
  """Returns (result, None), or (None, the message of its ValueError). Any other exception is a
  failure.
  """
  try:
    return function(*args), None
  except ValueError as error:
    return None, str(error)


def _check(name, changes):
  """Returns the resolved config, or None where a message that names a changed key rejects it."""
  config = _changed(name, changes)
  if config is None:
    return None
  resolved, told = _tried(CONFIGS[name].resolve, config)
  if told is not None:
    assert any(key.split(".")[-1] in told for key in changes), (changes, told)
    assert len(told) < 2000 * len(changes)
    return None
  # An accepted config equals config.json, with the types that the computations expect.
  text = json.dumps(resolved.to_dict(), default=list)
  assert json.loads(text) == json.loads(config_lib.to_json(resolved))
  # A key that may be open can be None.
  still_open = config_lib.open_keys(resolved)
  problems = config_key.type_problems(resolved.to_dict(), FILLED[name])
  assert [problem for problem in problems if problem.split()[0] not in still_open] == []
  return resolved


class TestResolve:
  @pytest.mark.parametrize("name", CONFIGS)
  def test_every_key_with_values_of_every_wrong_kind(self, name):
    taken = {
      (key, i)
      for key in _keys(DEFAULTS[name])
      for i, value in enumerate(WRONG)
      if _check(name, {key: value})
    }
    # Texts in text keys, True in flags, and so on are accepted. Most other values are rejected.
    assert len(taken) < 0.4 * len(WRONG) * len(list(_keys(DEFAULTS[name])))

  VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, 10**5000]),
    st.floats(),
    st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, 1e-45, 1e300]),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.complex_numbers(),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=2), st.none()), max_size=3).map(
      tuple
    ),
    st.lists(st.integers(1, 20), max_size=3),
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(), max_size=2),
  )

  @pytest.mark.parametrize("name", CONFIGS)
  @hypothesis.given(data=st.data())
  def test_any_values_in_several_keys(self, name, data):
    keys = st.sampled_from(sorted(_keys(DEFAULTS[name])))
    _check(name, data.draw(st.dictionaries(keys, self.VALUES, min_size=1, max_size=4)))

  @pytest.mark.parametrize("name", CONFIGS)
  @hypothesis.given(data=st.data())
  def test_numbers_and_names_of_the_right_kind(self, name, data):
    """Repeats the test above with values that mostly pass the check of types."""
    found = config_key.leaves(DEFAULTS[name])
    like = {
      key: value for key, value in found if not isinstance(value, (str, dict)) and value is not None
    }
    kinds = {
      bool: st.booleans(),
      int: st.integers(0, 300),
      float: st.floats(0, 2, width=16),
      tuple: st.lists(st.integers(1, 9) | st.floats(0.1, 1), max_size=3).map(tuple),
    }
    keys = data.draw(st.lists(st.sampled_from(sorted(like)), min_size=1, max_size=4, unique=True))
    _check(name, {key: data.draw(kinds[type(like[key])]) for key in keys})

  def test_unknown_and_missing_keys_are_told_with_the_known_ones(self):
    config = config_lib.default_config()
    with config.unlocked():
      config.train.stepz = 3
      del config.eval.ks
    with pytest.raises(
      ValueError, match=r"eval.ks is missing\n  train.stepz is unknown; keys here: .*steps"
    ):
      config_lib.resolve(config)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      (
        {"optim.milestones": (10, 10)},
        "optim.milestones must be ascending steps >= 1",
      ),  # one decay would be lost
      ({"eval.ks": (1, 10, 1)}, "eval.ks must be different numbers >= 1"),
      ({"data.workers": 10**6}, "data.workers must be >= 0 and <= 1024"),
      ({"model.embedding_dim": 10**9}, "model.embedding_dim must be >= 0 and <= 1048576"),
      (
        {"loss.tau2": 1e-40},
        "loss.tau2 must be a number; it must be 0, or of magnitude 1e-30 to 1e\\+30",
      ),
      (
        {"data.augmentation": "crop", "data.resize": 0},
        "data.resize, .* must be at least 224, the crop; got 0",
      ),
      ({"train": 3}, "train must be a group of keys: batch_size"),
      ({"train.steps": {"a": 1}}, "train.steps must be a single value"),
      ({"loss.custom": {"a": object()}}, "loss.custom.a must be a finite number"),
    ],
  )
  def test_what_would_fail_later_is_told_before(self, changes, message):
    with pytest.raises(ValueError, match=message):
      config_lib.resolve(_changed("retrieval", changes))

  @hypothesis.given(data=st.data())
  def test_what_a_run_has_noted(self, data):
    """Checks the same for ``config.json``, from which a run is replayed."""
    tree = json.loads(config_lib.to_json(config_lib.resolve(config_lib.default_config())))
    assert config_lib.from_json(tree).to_dict() == FILLED["retrieval"]
    *groups, last = data.draw(st.sampled_from(sorted(_keys(tree)))).split(".")
    node = tree
    for group in groups:
      node = node[group]
    node[data.draw(st.sampled_from([last, "more"]))] = data.draw(
      st.none() | st.integers() | st.floats() | st.text() | st.just([])
    )
    config, told = _tried(config_lib.from_json, tree)
    assert told or (
      not config_key.type_problems(config.to_dict(), FILLED["retrieval"]) and "more" not in node
    )

  def test_options_of_a_loss_of_ones_own_may_be_negative(self):
    assert (
      config_lib.resolve(
        _changed("retrieval", {"loss.custom": {"a": -3, "b": (1.5, "x")}})
      ).loss.custom.a
      == -3
    )

  @hypothesis.given(key=st.sampled_from(sorted(plans.default_settings())), value=VALUES)
  def test_plan(self, key, value):
    default = plans.default_settings().to_dict()
    plan, told = _tried(plans.read_plan, config_dict.ConfigDict(default | {key: value}))
    if told is None:
      assert type(getattr(plan, key)) is type(default[key])
    else:
      assert f"compare.{key} " in told


@hypothesis.given(value=st.recursive(st.integers() | st.text() | st.binary(), st.lists))
def test_shown_is_short(value):
  assert len(strings.shown(value)) <= 203


# Each line of the standard input is a list of arguments. A separate child parses them, since absl
# flags can be parsed once. Answers are lines too.
_PARSER = """
import contextlib, io, json, os, sys
from experiments import flags
import soprc_jax.training.config  # once, and not in every child
for line in sys.stdin:
  reader, writer = os.pipe()
  if not os.fork():
    sys.argv, told = ["program", *json.loads(line)], io.StringIO()
    try:
      with contextlib.redirect_stderr(told):
        flags.parse(sys.argv)
      answer = "taken"
    except SystemExit:
      answer = told.getvalue()
    except BaseException as error:
      answer = f"TRACEBACK {type(error).__name__}: {error}"
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)
  os.close(writer)
  with open(reader) as pipe:
    print("value of the test: " + pipe.read())
  os.wait()
"""
_TYPED = (
  "3.5",
  "perhaps",
  "(1,'a')",
  "(1,",
  "1e999",
  "{}",
  "",
  "'",
  "[1]",
  "9" * 5000,
  "None",
  "é\\",
  "(" * 300,
)
_OVERRIDDEN = (
  "train.steps",
  "eval.ks",
  "loss",
  "model.freeze_bn",
  "optim.learning_rate",
  "loss.self_weight",
  "compare.rates",
  "no.such",
  "",
)
_FILES = {
  "def get_config(:": "SyntaxError: invalid syntax",
  "x = 1": "it has no function get_config",
  "def get_config(): return {}": "must return a ConfigDict, as .* got dict",
  "def get_config(): pass": "must return a ConfigDict, as .* got NoneType",
  "def get_config(a, b): pass": "missing 2 required positional arguments",
  "def get_config():\n  return 1 / 0": r"ZeroDivisionError: division by zero \(.*:2\)",
  "import no_such_module": r"No module named 'no_such_module' \(.*:1\)",
  "get_config = 3": "TypeError: 'int' object is not callable",
}


class TestCommandLine:
  def test_overrides_and_config_files(self, tmp_path):
    calls = [
      ["--config=configs/glyphs.py", f"--config.{key}={value}"]
      for key in _OVERRIDDEN
      for value in _TYPED
    ]
    for i, content in enumerate(_FILES):
      (tmp_path / f"{i}.py").write_text(content)
    calls += [[f"--config={tmp_path}/{i}.py"] for i in range(len(_FILES))]
    given = "".join(json.dumps(call) + "\n" for call in calls)
    done = subprocess.run(
      [sys.executable, "-W", "ignore", "-c", _PARSER],
      input=given,
      capture_output=True,
      text=True,
      cwd=ROOT,
      timeout=300,
      check=True,
    )
    answers = [
      json.loads(line.removeprefix(runs.MARK))
      for line in done.stdout.splitlines()
      if line.startswith(runs.MARK)
    ]
    assert len(answers) == len(calls)
    for call, answer in zip(calls, answers, strict=True):
      if answer != "taken":
        assert answer.startswith("Error: "), (call, answer)
        assert call[-1].split("=")[0].removeprefix("--").split(".")[-1] in answer
    told = "\n".join(answers[-len(_FILES) :])
    for message in _FILES.values():
      assert re.search(message, told), message
    assert 10 < answers.count("taken") < 0.5 * len(calls)

  def test_memory_that_runs_out_is_told_with_what_to_lower(self, capsys):
    with pytest.raises(SystemExit), flags.errors_as_messages():
      raise MemoryError("Unable to allocate 6 TiB")
    with pytest.raises(SystemExit), flags.errors_as_messages():
      raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 6 TiB\nmore")
    assert capsys.readouterr().err.count("6 TiB): lower the sizes") == 2
