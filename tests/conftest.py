"""Configures a strict session: two CPU devices, no promotion of ranks or dtypes.

Examples of hypothesis are reproducible. Warnings are errors (setup.cfg).
"""

import atexit
import functools
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

# Set before jax is imported anywhere, since the device count is fixed when the backend starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
# Without the fusion emitters, compilation takes half the time. XLA ends a process that gives it a
# flag that it does not know, and that of jax 0.12 does not know this one.
if importlib.metadata.version("jax").startswith("0.10."):
  os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# The folder of the session, which the workers and the processes that tests start inherit.
if "SOPRC_JAX_TESTS" not in os.environ:
  folder = tempfile.mkdtemp(prefix="soprc_jax_tests_")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  os.environ["SOPRC_JAX_TESTS"] = folder
# Functions compiled by one test are reused by the others, in this process and in those that tests
# start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": os.path.join(os.environ["SOPRC_JAX_TESTS"], "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
# Most of the time goes to compilation, which takes two thirds of it without most of XLA's
# optimizations. This holds in processes that tests start too. `_OPTIMIZED` lists the exceptions.
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


# optax promotes int32 counts to floats in the bias correction of Adam and in MultiSteps. Only these
# two may. The transforms that MultiSteps calls are strict again.
optax.tree.bias_correction = _with_promotion("standard", optax.tree.bias_correction)
optax.MultiSteps.update = _with_promotion("standard", optax.MultiSteps.update)
optax.MultiSteps.__init__ = _with_strict_inside(optax.MultiSteps.__init__)

# The time of an example depends more on the machine than on the code.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("soprc", derandomize=True, max_examples=25, **_ANY_SPEED)
# HYPOTHESIS_PROFILE=thorough draws random examples, different each time or those of
# --hypothesis-seed. tests/core/properties_*_test.py draw the number of examples it gives.
hypothesis.settings.register_profile(
  "thorough", derandomize=False, max_examples=1000, print_blob=True, **_ANY_SPEED
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "soprc"))

# Every compiled function maps memory. A system allows a process 65,530 maps, and beyond them XLA
# crashes. A worker of the suite comes near that.
_MAPS, _MANY_MAPS = pathlib.Path("/proc/self/maps"), 20_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_functions_are_let_go():
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
    jax.clear_caches()


_METRICS = ("average_precision", "curves", "exact_ranks", "retrieval", "similarities")
# Programs as users run them are tested with all optimizations: against reference values and on the
# README.
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
  """Collects the examples of docs/, where a second conftest.py would clash with this one. Readers
  may promote ranks and dtypes.
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
