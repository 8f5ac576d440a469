"""Strict session: two CPU devices, no promotion of ranks or dtypes, reproducible hypothesis.

Warnings are errors (setup.cfg).
"""

import atexit
import functools
import os
import pathlib
import shutil
import tempfile

# Before jax is imported anywhere: the device count is fixed when the backend starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

# What one test has compiled, the others find, in this process and in those that tests start: the
# workers inherit the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  folder = tempfile.mkdtemp(prefix="soprc_jax_compiled_")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": folder,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
  }
# Most of the time goes to compilation, which takes two thirds of it without most of XLA's
# optimizations; in processes that tests start too. `_OPTIMIZED` has them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

import hypothesis
import jax
import optax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def _with_promotion(kind, function):
  @functools.wraps(function)
  def call(*args, **kwargs):
    with jax.numpy_dtype_promotion(kind):
      return function(*args, **kwargs)

  return call


def _with_strict_inside(init):
  @functools.wraps(init)
  def call(self, *args, **kwargs):
    init(self, *args, **kwargs)
    self._opt = self._opt._replace(update=_with_promotion("strict", self._opt.update))

  return call


# optax promotes int32 counts to floats in the bias correction of Adam and in MultiSteps. These
# alone may; the transforms that MultiSteps calls are strict again.
optax.tree.bias_correction = _with_promotion("standard", optax.tree.bias_correction)
optax.MultiSteps.update = _with_promotion("standard", optax.MultiSteps.update)
optax.MultiSteps.__init__ = _with_strict_inside(optax.MultiSteps.__init__)

# How long an example takes says more about the machine than about the code.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("soprc", derandomize=True, max_examples=25, **_ANY_SPEED)
# HYPOTHESIS_PROFILE=thorough: random examples, others each time or those of --hypothesis-seed;
# tests/core/properties_*_test.py have as many as it says.
hypothesis.settings.register_profile(
  "thorough", derandomize=False, max_examples=1000, print_blob=True, **_ANY_SPEED
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "soprc"))

# Every compiled function maps memory, a system allows a process 65,530 maps, and beyond them XLA
# crashes. A worker of the suite comes near.
_MAPS, _MANY_MAPS = pathlib.Path("/proc/self/maps"), 20_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_functions_are_let_go():
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
    jax.clear_caches()


_METRICS = ("average_precision", "curves", "exact_ranks", "retrieval", "similarities")
# What a user's programs compute is looked at with all optimizations: against reference values and
# on the README.
_OPTIMIZED = {"readme_test.py", "golden_test.py", *(f"{name}_test.py" for name in _METRICS)}


@pytest.fixture(autouse=True)
def _as_for_a_user(request):
  if request.path.name not in _OPTIMIZED and not request.node.get_closest_marker("optimized"):
    yield
    return
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


_PAGES = pathlib.Path(__file__).parents[1] / "docs"


class _Pages:
  """For the examples of docs/, where a second conftest.py would clash with this one.

  Readers may promote ranks and dtypes.
  """

  @pytest.fixture(autouse=True)
  def _as_for_a_reader(self, request):
    if _PAGES not in request.path.parents:
      yield
      return
    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config):
  config.pluginmanager.register(_Pages(), "pages")
