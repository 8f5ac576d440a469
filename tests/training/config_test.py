"""Tests configs: every file and argument resolves, and bad values are named.

The table is training/config_table.py, and the checks of several keys are training/config_rules.py.
Presets are those of the design.
"""

import functools
import json
import math
import runpy

import jax
import jax.numpy as jnp
import pytest
import runs

from experiments.binary import binary_config, binary_losses
from soprc_jax import soprc_loss
from soprc_jax.data import transforms
from soprc_jax.training import config as config_lib
from soprc_jax.training import config_key, defaults, objectives

_FILES = sorted(path for path in (runs.ROOT / "configs").glob("[!_]*.py") if path.stem != "common")
# Every study but retrieval has keys of its own.
_RESOLVE = dict.fromkeys(("imbalanced", "multilabel"), binary_config.resolve)


def _with(config, values):
  """Returns the config with dotted keys set, as flags do it."""
  for key, value in values.items():
    *parents, leaf = key.split(".")
    node = config
    for parent in parents:
      node = node[parent]
    assert leaf in node, key
    with node.ignore_type():
      node[leaf] = value
  return config


def _resolved(**values):
  return config_lib.resolve(
    _with(config_lib.default_config(), {key.replace("__", "."): v for key, v in values.items()})
  )


def _leaves(tree):
  for value in tree.values():
    yield from _leaves(value) if isinstance(value, dict) else [value]


def _arguments():
  """Returns every argument of every config file, and no argument."""
  cases = []
  for file in _FILES:
    names = ["", *runpy.run_path(str(file))["ARGUMENTS"]]
    cases += [pytest.param(file, name, id=f"{file.stem}:{name}") for name in names]
  return cases


def _open_by_data(config):
  """Returns the open keys of a config, which must all follow the data."""
  found = config_lib.open_keys(config)
  assert set(found) <= {*defaults.KEYS, *defaults.VIT_KEYS, *defaults.FEATURES_KEYS}
  return found


def _glyphs(argument):
  return config_lib.resolve(
    runpy.run_path(str(runs.ROOT / "configs" / "glyphs.py"))["get_config"](argument)
  )


class TestConfigFiles:
  @pytest.mark.parametrize(("file", "argument"), _arguments())
  def test_every_argument_resolves(self, file, argument):
    resolve = _RESOLVE.get(file.stem, config_lib.resolve)
    config = resolve(runpy.run_path(str(file))["get_config"](argument))
    assert "presets" not in config
    # data.confusable.refresh follows from the number of classes. The study of binary classification
    # has no such key, but no presets: None means a self weight of 1 / (M + 1) there.
    nones = 1 + len(_open_by_data(config))
    assert list(_leaves(config.to_dict())).count(None) == nones
    assert file.stem in ("folder", "features") or not _open_by_data(config)
    assert json.loads(config_lib.to_json(config))["train"]["steps"] == config.train.steps
    with pytest.raises(AttributeError):
      config.optim.learning_rat = 0.1

  @pytest.mark.parametrize(("file", "argument"), _arguments())
  def test_docstring_tells_the_arguments(self, file, argument):
    text = runpy.run_path(str(file))["__doc__"]
    assert f"--config={file.stem}" in text
    name = argument.rstrip("0123456789")  # ablation1 .. ablation5
    assert name in text

  @pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
  def test_unknown_argument_lists_the_known_ones(self, file):
    module = runpy.run_path(str(file))
    with pytest.raises(ValueError, match="nonsense") as error:
      module["get_config"]("nonsense")
    assert all(name in str(error.value) for name in module["ARGUMENTS"])

  def test_arguments_can_be_joined(self):
    config = _glyphs("finetune,triplet")
    assert (config.loss.name, config.model.freeze_bn) == ("triplet", True)

  @pytest.mark.parametrize(
    ("file", "argument"),
    [
      ("features", "mlp,residual"),
      ("folder", "soprc,small,triplet"),
      ("glyphs", "ablation1,ablation2"),
    ],
  )
  def test_alternatives_are_not_joined(self, file, argument):
    get_config = runpy.run_path(str(runs.ROOT / "configs" / f"{file}.py"))["get_config"]
    with pytest.raises(ValueError, match="exclude each other: give one of them"):
      get_config(argument)

  # The rows of the paper's Table 2: prior of the batch?, v, semi-variance term?, optimizer.
  @pytest.mark.parametrize(
    ("row", "biased", "v", "variance", "optimizer"),
    [
      (1, True, "batch", False, "sgd"),
      (2, False, "batch", False, "sgd"),
      (3, False, "carried", False, "sgd"),
      (4, False, "carried", True, "sgd"),
      (5, False, "carried", True, "adam"),
    ],
  )
  def test_ablation_rows(self, row, biased, v, variance, optimizer):
    config = _glyphs(f"ablation{row}")
    assert (config.loss.prior.kind == "batch") == biased
    assert config.loss.v == v
    assert (config.loss.lambda1, config.loss.lambda2) == ((1.0, 5.0) if variance else (0.0, 0.0))
    assert config.optim.name == optimizer


class TestTable:
  @pytest.mark.parametrize("module", [config_lib, binary_config], ids=["retrieval", "binary"])
  def test_every_key_has_a_meaning_and_a_default_that_works(self, module):
    assert len({key.name for key in module.KEYS}) == len(module.KEYS)
    assert [key.name for key in module.KEYS if len(key.meaning) < 4 or not key.allowed] == []
    config = module.resolve(module.default_config())
    assert config_key.value_problems(module.KEYS, config) == []
    assert {name for name, _ in config_key.leaves(config.to_dict())} | {"loss.custom"} == (
      {key.name for key in module.KEYS} | {"loss.custom"}
    )
    # A key without a default has a type, which any value set later must have.
    assert all((key.default is None) == (key.kind is not None) for key in module.KEYS)

  def test_presets_decide_the_keys_without_a_default(self):
    open_keys = {
      key.name for key in config_lib.KEYS if key.default is None and key.name.startswith("loss.")
    }
    for preset in config_lib.PRESETS.values():
      assert {f"loss.{name}" for name, _ in config_key.leaves(preset)} == open_keys

  def test_keys_name_losses_that_there_are(self):
    named = {name for key in config_lib.KEYS for name in key.losses} - {"custom losses"}
    assert named == objectives.LOSSES.keys()
    named = {name for key in binary_config.KEYS for name in key.losses}
    assert named <= binary_losses.LABELS.keys()
    # Each loss has its own options.
    for key in config_lib.KEYS:
      group = key.name.removeprefix("loss.").partition(".")[0]
      assert group not in objectives.LOSSES or key.losses == (group,), key.name

  def test_settings_of_the_augmentation_are_those_of_the_library(self):
    data = config_lib.default_config().data
    assert {name: data[name] for name in transforms.Settings._fields} == (
      transforms.DEFAULTS._asdict()
    )
    users = {
      key.name: set(key.used_with[1])
      for key in config_lib.KEYS
      if key.used_with and key.used_with[0] == "data.augmentation"
    }
    assert users.keys() == {
      "data.resize",
      *(f"data.{name}" for name in transforms.Settings._fields),
    }
    assert set.union(*users.values()) == set(transforms.AUGMENTATIONS) - {"none"}


class TestOpenKeys:
  def _open(self, *names):
    config = config_lib.default_config()
    config_lib.leave_open(config, *names)
    return config

  def test_stay_open_until_they_are_filled(self):
    config = config_lib.resolve(self._open("train.batch_size", "optim.learning_rate"))
    assert config_lib.open_keys(config) == ["optim.learning_rate", "train.batch_size"]
    half = config_lib.fill(config, {"train.batch_size": 12, "train.per_class": 3})
    assert config_lib.open_keys(half) == ["optim.learning_rate"]
    full = config_lib.fill(half, {"optim.learning_rate": 0.5})
    assert (full.train.batch_size, full.optim.learning_rate) == (12, 0.5)
    assert full.train.per_class == 4  # it was not open
    with pytest.raises(AttributeError):
      full.train.batch_siz = 4

  def test_a_value_of_the_user_keeps_the_type(self):
    config = self._open("optim.learning_rate", "train.steps")
    config.update_from_flattened_dict({"optim.learning_rate": 1, "train.steps": 7})
    assert config_lib.open_keys(config_lib.resolve(config)) == []
    with pytest.raises(TypeError):
      config.train.steps = "many"

  @pytest.mark.parametrize("value", [-1, 2.5, "x"])
  def test_values_are_checked_when_they_are_filled(self, value):
    config = config_lib.resolve(self._open("train.batch_size"))
    with pytest.raises(ValueError, match=r"train\.batch_size must be .*got"):
      config_lib.fill(config, {"train.batch_size": value})

  def test_other_keys_are_checked_while_one_is_open(self):
    with pytest.raises(ValueError, match=r"loss\.tau1 must be > 0"):
      config_lib.resolve(_with(self._open("train.batch_size"), {"loss.tau1": 0.0}))

  def test_a_stored_config_has_no_open_key(self):
    tree = json.loads(config_lib.to_json(config_lib.resolve(self._open("train.steps"))))
    with pytest.raises(ValueError, match=r"train\.steps must have a value; got None"):
      config_lib.from_json(tree)

  def test_a_stored_config_may_have_the_choices(self):
    config = _resolved()
    text = config_lib.to_json(config, {"train.steps": {"value": 3, "reason": "time"}})
    assert config_lib.to_json(config_lib.from_json(json.loads(text))) == config_lib.to_json(config)


# key, bad value, what else the message must name.
_BAD = [
  ("seed", -1, ">= 0"),
  ("data.source", "imagenet", "glyphs"),
  ("data.augmentation", "mixup", "affine"),
  ("data.min_crop_area", 0.0, "> 0"),
  ("data.min_crop_area", 20.0, "<= 1"),  # a percentage
  ("data.color_jitter", 1.5, "<= 1"),
  ("data.max_scale", 1.0, "<= 0.9"),
  ("data.max_rotation", -15.0, ">= 0"),
  ("data.image_size", 0, ">= 1"),
  ("data.small_classes", "ignore", "mask, repeat, drop"),
  ("data.train_share", 0.0, "> 0"),
  ("data.train_share", 1.5, "<= 1"),
  ("data.train_share", math.nan, "> 0"),
  ("data.val_share", 0.0, "> 0"),
  ("data.val_share", 1.5, "<= 1"),
  ("data.workers", -1, ">= 0"),
  ("data.split_seed", 2**31, "<= 2147483647"),
  ("data.prefetch", 0, ">= 1"),
  ("model.name", "resnet9", "resnet50"),
  ("model.stem", "tiny", "small"),
  ("model.stem_stride", 3, "1, 2"),
  ("model.width", 0, ">= 1"),
  ("model.embedding_dim", -1, ">= 0"),
  ("model.dtype", "float16", "bfloat16"),
  ("loss.name", "softmax", "soprc"),
  ("loss.preset", "papr", "paper"),
  ("loss.v", "memory", "carried, batch"),
  ("loss.link", "odds", "share, log"),
  ("loss.tau1", 0.0, "> 0"),
  ("loss.tau1", math.inf, "> 0"),
  ("loss.tau2", -0.001, "> 0"),
  ("loss.tau1_start", -0.1, ">= 0"),
  ("loss.beta", 0.0, "> 0"),
  ("loss.beta", 1.5, "<= 1"),
  ("loss.num_points", 0, ">= 1"),
  ("loss.lambda1", -1.0, ">= 0"),
  ("loss.lambda2", math.nan, ">= 0"),
  ("loss.self_weight", -0.5, ">= 0"),
  ("loss.self_weight", 2.0, "<= 1"),
  ("loss.self_weight", -1.0, ">= 0"),
  ("loss.initial_v", "ones", "debiased, uniform"),
  ("loss.grid", "blok", "blocks"),
  ("loss.average_over", "active", "selected, all"),
  ("loss.pool", "class", "batch, list"),
  ("loss.prior.kind", "true", "frequency"),
  ("loss.prior.value", 30.0, "<= 1"),  # a percentage
  ("loss.prior.value", 0.0, "> 0"),
  ("loss.prior.start", 1.5, "<= 1"),
  ("loss.triplet.margin", -0.1, ">= 0"),
  ("loss.blackbox.margin", -0.1, ">= 0"),
  ("optim.name", "lion", "sgd, adam"),
  ("optim.learning_rate", -0.1, ">= 0"),
  ("optim.learning_rate", math.nan, ">= 0"),
  ("optim.schedule", "linear", "cosine"),
  ("optim.milestones", (300, 100), "ascend"),
  ("optim.decay_factor", -1.0, ">= 0"),
  ("optim.ramp_steps", -1, ">= 0"),
  ("optim.momentum", 1.5, "<= 1"),
  ("optim.weight_decay", -1e-4, ">= 0"),
  ("optim.head_multiplier", -1.0, ">= 0"),
  ("optim.train_only", "head(", "a regular expression"),
  ("optim.layer_decay", 0.0, "> 0"),
  ("optim.layer_decay", 1.5, "<= 1"),
  ("model.lora.rank", -1, ">= 0"),
  ("model.lora.alpha", 0.0, "> 0"),
  ("model.lora.targets", "*", "a regular expression"),
  ("warmup.steps", -1, ">= 0"),
  ("warmup.loss", "soprc", "must have no carried state"),
  ("warmup.learning_rate", -1.0, ">= 0"),
  ("train.steps", -1, ">= 0"),
  ("train.steps", 0, "at least 1"),
  ("train.batch_size", 226, "224 or 228"),
  ("train.batch_size", 4, "8 or 12"),
  ("train.per_class", 1, "at least 2"),
  ("train.microbatch", 9, "must divide train.batch_size=224, e.g. 4, 7, 8"),
  ("train.microbatch", 448, "e.g. 56, 112, 224, or be 0"),
  ("train.microbatch", -4, "must divide"),
  ("eval.every", -1, ">= 0"),
  ("eval.image_size", 0, ">= 1"),
  ("eval.batch_size", 0, ">= 1"),
  ("eval.block_size", 0, ">= 1"),
  ("eval.ks", (0, 10), ">= 1"),
  ("eval.ks", (), ">= 1"),
  ("checkpoint.every", -1, ">= 0"),
  ("checkpoint.keep", 0, ">= 1"),
  ("log.line_every", 0, ">= 1"),
]


class TestCheck:
  @pytest.mark.parametrize(
    ("key", "value", "hint"), _BAD, ids=[f"{key}={value}" for key, value, _ in _BAD]
  )
  def test_bad_value_is_named_with_what_is_allowed(self, key, value, hint):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")) as error:
      config_lib.resolve(_with(config_lib.default_config(), {key: value}))
    line = next(line for line in str(error.value).splitlines() if key in line)
    assert hint in line
    if key not in ("data.val_share", "train.steps", "eval.ks"):
      assert str(value) in line

  def test_all_problems_are_told_at_once(self):
    with pytest.raises(ValueError, match="config") as error:
      _resolved(model__width=0, optim__name="lion", loss__tau1=-1.0)
    assert all(key in str(error.value) for key in ("model.width", "optim.name", "loss.tau1"))

  def test_values_at_the_edge_are_allowed(self):
    _resolved(
      loss__beta=1.0,
      loss__self_weight=1.0,
      loss__prior__value=1.0,
      optim__momentum=0.0,
      optim__learning_rate=0.0,
      loss__lambda1=0.0,
      eval__every=0,
      checkpoint__every=0,
      train__batch_size=8,
      warmup__steps=3,
      train__steps=0,
    )

  def test_prior_value_plays_no_role_in_kinds_without_one(self):
    for kind in ("frequency", "batch"):
      assert _resolved(loss__prior__kind=kind, loss__prior__value=0.0).loss.prior.kind == kind

  def test_adapters_leave_no_choice_of_what_is_trained(self):
    _resolved(**{"model.lora.rank": 4})
    with pytest.raises(ValueError, match=r"train_only must be empty with model\.lora\.rank > 0"):
      _resolved(**{"model.lora.rank": 4, "optim.train_only": "layer4"})

  def test_layer_decay_wants_layers(self):
    _resolved(**{"optim.layer_decay": 0.7})
    values = {"data.source": "features", "data.augmentation": "none", "model.name": "mlp"}
    with pytest.raises(
      ValueError, match=r"layer_decay must be 1 with model\.name=mlp, .* got 0\.7"
    ):
      _resolved(**values, **{"optim.layer_decay": 0.7})

  def test_microbatches_want_frozen_batch_norm_in_every_phase_that_trains(self):
    assert _resolved(train__microbatch=32).train.microbatch == 32
    assert (
      _resolved(train__microbatch=224, model__freeze_bn=False).train.microbatch == 224
    )  # one: the batch itself
    assert (
      _resolved(train__microbatch=32, warmup__steps=5, warmup__freeze_bn=True).train.microbatch
      == 32
    )
    for key, values in (("model", {}), ("warmup", {"warmup__steps": 5})):
      with pytest.raises(
        ValueError,
        match=rf"train\.microbatch must be 0 with {key}\.freeze_bn=False: .*statistics.*Freeze it",
      ):
        _resolved(train__microbatch=32, **{f"{key}__freeze_bn": False}, **values)

  def test_every_numeric_key_is_checked(self):
    # A key added without a check would accept any value until a run fails hours later.
    unchecked = []
    for key, value in _numbers(config_lib.default_config().to_dict()):
      if key.startswith("presets."):
        continue
      config = _with(
        config_lib.default_config(), {key: math.nan if isinstance(value, float) else -3}
      )
      try:
        config_lib.resolve(config)
        unchecked.append(key)
      except ValueError:
        pass
    assert unchecked == []


def _numbers(tree, prefix=""):
  for name, value in tree.items():
    if isinstance(value, dict):
      yield from _numbers(value, f"{prefix}{name}.")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      yield prefix + name, value


# The table of the design (section 2): the keys that a preset sets.
_PRESETS = {
  "default": {
    "tpr_gradient": False,
    "self_weight": 1 / 101,
    "initial_v": "debiased",
    "grid": "midpoints",
    "average_over": "selected",
    "pool": "batch",
    "mean_gradient": True,
    "prior.kind": "scaled",
  },
  "paper": {
    "tpr_gradient": True,
    "self_weight": 0,
    "initial_v": "uniform",
    "grid": "midpoints",
    "average_over": "all",
    "pool": "list",
    "prior.kind": "frequency",
  },
  "authors": {
    "tpr_gradient": False,
    "self_weight": 1 / 101,
    "initial_v": "uniform",
    "grid": "blocks",
    "average_over": "selected",
    "pool": "batch",
    "mean_gradient": True,
    "prior.kind": "scaled",
  },
}


class TestPresets:
  @pytest.mark.parametrize("preset", config_lib.PRESETS)
  def test_resolves_to_the_design(self, preset):
    loss = _resolved(loss__preset=preset).loss
    got = {key: loss.prior.kind if key == "prior.kind" else loss[key] for key in _PRESETS[preset]}
    assert got == _PRESETS[preset]

  @pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
      ("paper", "tpr_gradient", False),
      ("default", "self_weight", 0.0),
      ("authors", "grid", "midpoints"),
      ("paper", "initial_v", "debiased"),
      ("authors", "mean_gradient", False),
      ("default", "pool", "list"),
      ("paper", "prior__kind", "constant"),
      ("authors", "prior__value", 0.01),
    ],
  )
  def test_a_value_set_by_hand_wins(self, preset, key, value):
    extra = {"loss__prior__value": 0.5} if value == "constant" else {}
    loss = _resolved(loss__preset=preset, **{f"loss__{key}": value}, **extra).loss
    assert (loss.prior[key.removeprefix("prior__")] if "prior" in key else loss[key]) == value

  @pytest.mark.parametrize("preset", config_lib.PRESETS)
  def test_a_config_file_can_change_the_self_weight_of_a_preset(self, preset):
    config = config_lib.default_config()
    config.loss.preset = preset
    config.presets[preset].self_weight = 0.05
    assert config_lib.resolve(config).loss.self_weight == 0.05
    assert _resolved(loss__preset=preset).loss.self_weight != 0.05  # no other config has changed

  def test_a_start_of_zero_by_hand_wins_over_the_config_files(self):
    config = runpy.run_path(str(runs.ROOT / "configs" / "glyphs.py"))["get_config"]("")
    assert config_lib.resolve(config).loss.prior.start > 0
    assert config_lib.resolve(_with(config, {"loss.prior.start": 0.0})).loss.prior.start == 0

  def test_a_config_of_another_program(self):
    config = runpy.run_path(str(runs.ROOT / "configs" / "imbalanced.py"))["get_config"]("digits")
    with pytest.raises(
      ValueError, match=r"the config has no checkpoint, log, .*for soprc train-binary"
    ):
      config_lib.resolve(config)

  def test_the_input_is_left_alone(self):
    config = config_lib.default_config()
    before = config.to_dict()
    config_lib.resolve(config)
    assert config.to_dict() == before


class TestSelfWeight:
  @pytest.mark.parametrize("points", [1, 20, 100])
  def test_of_a_preset_is_one_of_the_points_and_the_positive(self, points):
    assert _resolved(loss__num_points=points).loss.self_weight == 1 / (points + 1)
    assert _resolved(loss__num_points=points, loss__preset="paper").loss.self_weight == 0
    assert _resolved(loss__num_points=points, loss__self_weight=0.3).loss.self_weight == 0.3

  @pytest.mark.parametrize("points", [1, 20, 100])
  def test_is_the_librarys_to_the_last_bit(self, points):
    positive, negative = jnp.array([[0.9, 0.6]]), jnp.array([[0.55, 0.7]])
    v = jnp.linspace(0.5, 0.8, points)[None]
    losses = [
      jax.jit(functools.partial(soprc_loss, prior=0.1, tau2=0.1, self_weight=weight))(
        positive, negative, v
      )
      for weight in (None, _resolved(loss__num_points=points).loss.self_weight)
    ]
    assert losses[0] == losses[1] > 0

  @pytest.mark.parametrize("preset", config_lib.PRESETS)
  def test_keys_that_older_versions_did_not_write_take_those_of_the_preset(self, preset):
    config = _resolved(loss__preset=preset, loss__num_points=20)
    for key in config_lib.KEYS:
      if key.default is None:
        old = json.loads(config_lib.to_json(config))
        *groups, last = key.name.split(".")
        del functools.reduce(lambda node, group: node[group], groups, old)[last]
        assert config_lib.from_json(old).to_dict() == config.to_dict()

  def test_a_stored_preset_that_there_is_not(self):
    old = json.loads(config_lib.to_json(_resolved()))
    old["loss"]["preset"] = "papr"
    with pytest.raises(ValueError, match=r"loss\.preset must be one of default, paper, authors"):
      config_lib.from_json(old)


class TestDifferences:
  def _dicts(self, **values):
    return json.loads(config_lib.to_json(_resolved())), json.loads(
      config_lib.to_json(_resolved(**values))
    )

  def test_same(self):
    assert config_lib.differences(*self._dicts()) == []

  def test_each_key_that_differs_is_listed_with_both_values(self):
    here, there = self._dicts(optim__learning_rate=0.5, model__width=8, eval__ks=(1, 2))
    lines = config_lib.differences(here, there)
    assert [line.split(":")[0] for line in lines] == [
      "eval.ks",
      "model.width",
      "optim.learning_rate",
    ]
    assert "0.5 there, 0.01 here" in lines[2]

  @pytest.mark.parametrize(
    ("key", "value"), [("data__workers", 3), ("data__prefetch", 9), ("log__progress", False)]
  )
  def test_keys_that_change_no_result_may_differ(self, key, value):
    assert config_lib.differences(*self._dicts(**{key: value})) == []

  def test_a_key_that_only_one_has(self):
    assert config_lib.differences({"a": {"b": 1}}, {"a": {}}) == ["a.b: None there, 1 here"]
    assert config_lib.differences({"a": {}}, {"a": {"b": 1}}) == ["a.b: 1 there, None here"]


@pytest.mark.parametrize(
  ("name", "used", "unused"),
  [
    (
      "soprc",
      ["loss.lambda2", "loss.prior.start", "loss.preset", "optim.name"],
      ["loss.smooth_ap.tau", "loss.triplet.margin", "loss.custom.a"],
    ),
    (
      "ap",
      ["loss.name", "loss.tau1", "loss.tpr_gradient"],
      ["loss.lambda2", "loss.prior.kind", "loss.beta"],
    ),
    ("triplet", ["loss.triplet.margin"], ["loss.tau1", "loss.preset", "loss.smooth_ap.tau"]),
    ("configs.glyphs:get_config", ["loss.lambda2", "loss.custom.a"], []),
  ],
)
def test_keys_that_a_loss_does_not_use_are_told(name, used, unused):
  config = config_lib.default_config()
  config.loss.name = name
  assert config_lib.unused_problems(config, used) == []
  told = config_lib.unused_problems(config, unused)
  assert [line.split(" is not used by")[0] for line in told] == unused
  assert all(f"loss.name={name}: leave it out" in line for line in told)


def test_keys_of_images_are_not_used_by_features():
  config = config_lib.default_config()
  names = ("data.image_size", "data.on_broken", "eval.image_size", "eval.resize")
  assert config_lib.unused_problems(config, names) == []
  config.data.source = "features"
  told = config_lib.unused_problems(config, (*names, "data.small_classes"))
  assert [line.partition(" is not used by data.source=features: ")[0] for line in told] == [*names]


def test_keys_of_the_loss_of_the_warm_up_are_used():
  config = config_lib.default_config()
  config.warmup.loss = "triplet"
  for steps in (0, 5):
    config.warmup.steps = steps
    assert len(
      config_lib.unused_problems(config, ["loss.triplet.margin", "loss.xbm.memory_size"])
    ) == (1 if steps else 2)


@pytest.mark.parametrize(
  ("augmentation", "used"),
  [
    ("none", set()),
    ("crop", {"resize", "flip", "color_jitter"}),
    ("resized_crop", {"min_crop_area", "flip", "color_jitter"}),
    ("affine", {*transforms.Settings._fields} - {"min_crop_area"}),
  ],
)
@pytest.mark.parametrize("loss", ["soprc", "configs.glyphs:get_config"])
def test_keys_that_an_augmentation_does_not_use_are_reported(augmentation, used, loss):
  config = config_lib.default_config()
  config.data.augmentation, config.loss.name = augmentation, loss
  names = ("resize", *transforms.Settings._fields)
  told = config_lib.unused_problems(config, (f"data.{name}" for name in (*names, "source")))
  assert [
    line.partition(f" is not used by data.augmentation={augmentation}: ")[0] for line in told
  ] == [f"data.{name}" for name in names if name not in used]
  assert augmentation == "resized_crop" or any(
    line.endswith("or choose resized_crop") for line in told
  )
