"""Defines the flags that all entry points share, and turns user errors into messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import difflib
import errno
import functools
import importlib
import io
import logging
import os
from pathlib import Path
import runpy
import signal
import sys
import time
import traceback
from typing import Any, NamedTuple, NoReturn

from absl import flags
from ml_collections import config_dict, config_flags

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Config file, with an argument after a colon: configs/glyphs.py or configs/glyphs.py:triplet. "
  "Any key can be overridden: --config.optim.learning_rate=0.002. The most used keys are below; "
  "--helpfull and docs/config.md list all.",
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Folder of the run. Programs that train need a new folder, or one of the same config to resume.",
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed",
  False,
  "One run on several processes that SLURM, Open MPI, Kubernetes or Cloud TPU started (train and "
  "evaluate).",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "HOST:PORT of process 0, for processes that none of the above started; with the next two flags.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "Number of processes in the run.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Number of this process, from 0.", lower_bound=0
)


# Folder of the files that ``--config=NAME`` names.
_CONFIGS = Path(__file__).parents[1] / "configs"

# Flags of absl that print help and end the process.
_HELP = ("help", "helpshort", "helpfull", "helpxml", "?")

# The file by which a program recognizes its own folder (see `folder`) -> what else it writes there,
# see `workdir.check_files`.
WRITES = {
  "benchmark.json": ("table.md", "growth_*.png"),
  "config.json": (
    "results.json",
    "table.md",
    "pr_curves.png",
    "convergence.png",
    "costs.json",
    "data.json",
    "runs",
  ),
  "simulation.json": (
    "densities.png",
    "estimation_zero_one.png",
    "estimation_surrogate.png",
    "interpolation.png",
    "tracking.png",
  ),
  "stability.json": (
    "table.md",
    "constant_rate.png",
    "theorem2.png",
    "progress.png",
    "theorem1.png",
  ),
}

# Words for the value of a config key, by its type.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a tuple"}


# Loggers of the library and of the programs.
_LOGGERS = ("soprc_jax", "experiments")


class Run(NamedTuple):
  """A checked config and an absolute workdir, read from the flags."""

  config: Any
  workdir: Path


def parse(argv: Sequence[str], *, config: str = "soprc_jax.training.config") -> list[str]:
  """Parses the flags for ``app.run``, with messages instead of tracebacks.

  Wrong flags, config files and overrides end the process with a message.

  Args:
    argv: arguments of the process.
    config: module whose ``KEYS`` describe the config of the program, for its help.
  """
  _prepare_streams()
  _show_help(argv, config)
  argv = _with_one_config(argv)
  try:
    rest = flags.FLAGS(argv)
    # A config file that fails to load raises only when its value is read.
    if flags.FLAGS["config"].present:
      _CONFIG.value.to_dict()
    return rest
  except Exception as error:  # a config file written by a user can raise anything
    _exit(_config_mistake(_before_dashes(argv), error) or f"{error}\nTry --help.")


def _before_dashes(argv: Sequence[str]) -> list[str]:
  """Returns the arguments before ``--``; those after it are no flags."""
  return list(argv[: argv.index("--") if "--" in argv else None])


def _with_one_config(argv: Sequence[str]) -> list[str]:
  """Returns the arguments with one ``--config=PATH``, in place of all forms of that flag.

  The last value counts. It stands at the place of the first, since overrides must follow it.
  """
  given = _before_dashes(argv)
  kept: list[str] = []
  place, words = None, iter(given)
  for word in words:
    flag, equals, value = word.partition("=")
    config = (value if equals else next(words, None)) if flag in ("-config", "--config") else None
    if config is None:
      kept.append(f"-{word}" if word.startswith("-config.") else word)
      continue
    if place is None:
      place = len(kept)
      kept.append("")
    kept[place] = f"--config={_path(config)}"
  return [*kept, *argv[len(given) :]]


def _path(given: str) -> str:
  """Returns the path of a file in ``configs/`` for NAME[:ARGUMENT]; else expands ``~``.

  A shell expands ``~`` at the start of a word only.
  """
  name, colon, rest = given.partition(":")
  if name in _config_names() and not os.path.isfile(name):
    return f"{_CONFIGS / name}.py{colon}{rest}"
  return os.path.expanduser(given)


def _config_names() -> list[str]:
  """Returns the names that ``--config=NAME`` takes."""
  return sorted(file.stem for file in _CONFIGS.glob("[!_]*.py") if file.stem != "common")


def _show_help(argv: Sequence[str], config: str) -> None:
  """Prints the help if a flag asks for it, and ends the process with status 0.

  Other flags do not matter then. absl would end the process with status 1.
  """
  for argument in _before_dashes(argv)[1:]:
    if argument.lstrip("-") in _HELP and argument.startswith("-"):
      with contextlib.suppress(SystemExit):
        flags.FLAGS([argv[0], argument])
      if (
        "config" in {flag.name for flag in flags.FLAGS.get_key_flags_for_module(argv[0])}
        and "xml" not in argument
      ):
        print(f"\n{_help_on_keys(config, every='full' in argument)}")
      sys.exit(0)


def _help_on_keys(config: str, *, every: bool) -> str:
  """Returns the keys of a config with default, allowed values and meaning.

  Without ``every`` these are only the keys that are used most.
  """
  keys = [key for key in importlib.import_module(config).KEYS if every or key.often]
  lines = [
    f"  --config.{key.name}: {key.meaning}\n    ({key.allowed}; default: {key.default!r})"
    for key in keys
  ]
  return "\n".join(
    [
      f"{'All' if every else 'Often used'} keys of the config; a config file changes defaults:",
      *lines,
    ]
  )


def _prepare_streams() -> None:
  """Makes printing safe: no character or closed reader can end a program.

  A terminal may lack a character, and a reader like ``head`` may have left.
  """
  for name, original in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
    stream = getattr(sys, name)
    if stream is None:  # closed by the shell: 1>&-
      setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115
    elif stream is original and isinstance(
      stream, io.TextIOWrapper
    ):  # otherwise set by tests or a notebook
      raw = _Output(stream.fileno(), "w", closefd=False)
      made = io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
      )
      setattr(sys, name, made)


class _Output(io.FileIO):
  """Writes to a stream of the process, and drops what cannot be written.

  A run must not end because of ``| head`` or a closed terminal.

  If the disk is too full for the results, the program ends with a message.
  """

  lost = False

  def write(self, data: Any) -> int:
    try:
      return memoryview(data).nbytes if self.lost else super().write(data)
    except OSError as error:
      self.lost = error.errno not in (errno.EPIPE, errno.EIO) and self.fileno() == 1
      if self.lost and not sys.is_finalizing():
        _leave(
          f"Error: the output cannot be written ({error.strerror}); the results are in the files "
          "that the program wrote",
          1,
        )
      return memoryview(data).nbytes


def require(argv: Sequence[str], example: str, **values: Any) -> None:
  """Ends the process with a message if a flag is missing or an argument is no flag.

  Also sets up logging.

  Args:
    argv: what the flags parser has left over.
    example: flags that work, for the message.
    **values: flag -> its value.
  """
  if len(argv) > 1:
    _exit(
      f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --config.optim.name=adam"
    )
  missing = [name for name, value in values.items() if not value]
  if missing:
    _exit(
      f"missing {' and '.join('--' + name for name in missing)}. For example:\n  {_command()} "
      f"{example}"
    )
  _set_up_logging()


def folder(argv: Sequence[str], example: str, own: str) -> Path:
  """Returns ``--workdir`` as an absolute path, for programs without a config.

  Checks the flags like `require`.

  Args:
    argv: what the flags parser has left over.
    example: flags that work, for the message.
    own: the file by which the program recognizes its own folder, a key of `WRITES`.
  """
  require(argv, example, workdir=_WORKDIR.value)
  path = _workdir()
  if path.is_dir():
    from soprc_jax.training import workdir

    with errors_as_messages():
      workdir.check_files(path, WRITES[own], own=own)
  return path


def existing_folder(argv: Sequence[str], example: str) -> Path:
  """Returns ``--workdir`` as an absolute path, for programs that only read a run.

  Checks the flags like `require`.
  """
  require(argv, example, workdir=_WORKDIR.value)
  path = _workdir()
  if not path.is_dir():
    _exit(f"--workdir={path} does not exist: give the folder of a run")
  return path


def prepare_jax() -> None:
  """Makes a program that trains faster; call it before jax computes anything.

  Compiled functions are stored, so that the next run starts faster. Their place is the user's cache
  or ``JAX_COMPILATION_CACHE_DIR``. Freed memory is kept for the next step.
  """
  import jax

  from experiments import malloc
  from soprc_jax._internal import cache

  malloc.keep_pages()
  if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    try:
      jax.config.update("jax_compilation_cache_dir", str(cache.private_folder("jax")))
    except OSError as error:
      logging.getLogger("soprc_jax").warning("Compiled functions cannot be cached (%s).", error)
  if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
    # A run compiles dozens of small programs; by default jax caches only those that took a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _workdir() -> Path:
  from soprc_jax._internal import file_io

  with errors_as_messages():
    path = file_io.given(_WORKDIR.value or "", name="--workdir").absolute()
    if path.is_file():
      raise ValueError(f"--workdir={path} is a file: choose a new folder")
  return path


def _config_mistake(argv: Sequence[str], error_of_flags: Exception) -> str | None:
  """Returns what is wrong with ``--config=FILE[:ARGUMENT]`` or ``--config.KEY``.

  The message is clearer than that of the flags library. None if nothing is found.

  Args:
    argv: what `_with_one_config` returns, up to ``--``.
    error_of_flags: error of the flags library.
  """
  for name in [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]:
    if "://" in name:
      return f"--config={name}: remote files are not supported. Give a path of this machine"
    path, *argument = name.split(":", 1)
    if not os.path.isfile(path):  # False for a name that is too long, where Path raises
      there = _config_names()
      close = difflib.get_close_matches(Path(path).stem, there, n=1, cutoff=0.5)
      hint = f" Did you mean {close[0]!r}?" if close else ""
      return (
        f"--config: there is no file {path!r} and no config of that name.{hint} Names: "
        f"{', '.join(there)}"
      )
    try:
      config = runpy.run_path(path)["get_config"](*argument)
    except ValueError as error:
      return f"--config={name}: {error}"
    except Exception as error:
      return f"--config={name} cannot be loaded: {_told(error, path)}"
    if not isinstance(config, config_dict.ConfigDict):
      return (
        f"--config={name}: its get_config must return a ConfigDict, as "
        f"soprc_jax.training.config.default_config() does; got {type(config).__name__}"
      )
    for override in argv:
      if override.startswith("--config."):
        key = override.removeprefix("--config.").split("=")[0]
        message = _unknown_key(config, key.split(".")) or _wrong_value(
          config, key, path, error_of_flags
        )
        if message:
          return message
    return None
  changed = [override.split("=")[0] for override in argv if override.startswith("--config.")]
  return (
    f"{changed[0]} changes a key of a config: give --config=FILE too, as in training"
    if changed
    else None
  )


def _told(error: Exception, path: str) -> str:
  """Returns the message of an error in a config file, with the line that failed."""
  if isinstance(error, KeyError) and error.args == ("get_config",):
    return "it has no function get_config, which returns the config"
  lines = [
    frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path
  ]
  return f"{type(error).__name__}: {error}" + (f" ({path}:{lines[-1]})" if lines else "")


def _unknown_key(config: Any, path: Sequence[str]) -> str | None:
  """Returns the message for a key that the config does not have, or None.

  It names the nearest key and all keys of the same group.
  """
  node: Any = config
  for depth, part in enumerate(path):
    keys = sorted(node) if isinstance(node, config_dict.ConfigDict) else []
    if part not in keys:
      close = difflib.get_close_matches(part, keys, n=1)
      hint = f" Did you mean {'.'.join([*path[:depth], close[0]])!r}?" if close else ""
      parent = ".".join(path[:depth]) or "the config"
      return (
        f"--config: unknown key {'.'.join(path)!r}.{hint}\nKeys of {parent}: "
        f"{', '.join(keys) or 'none'}"
      )
    node = node[part]
  return None


def _wrong_value(config: Any, key: str, path: str, error: Exception) -> str | None:
  """Returns the message for an override whose value has the wrong type.

  None if the error of the flags library is not about that key.
  """
  told = str(error)
  if f"--config.{key}=" not in told:
    return None
  *parents, last = key.split(".")
  node = functools.reduce(lambda node, part: node[part], parents, config)
  kind = _KINDS.get(node.get_type(last), node.get_type(last).__name__)
  example = "" if node[last] is None else f", as {node[last]!r} in {path}"
  return f"--config.{key} must be {kind}{example}: {told.removeprefix('flag ')}"


def read(
  argv: Sequence[str],
  *,
  several_processes: bool = False,
  without_config: str = "",
  change: Callable[[Any], None] | None = None,
) -> Run:
  """Returns the checked config and workdir; ends the process with a message on errors.

  Args:
    argv: what the flags parser has left over.
    several_processes: whether the program can be one of several processes. It joins them if the
      flags say so.
    without_config: flags that work, for a program that can take the config from the run. Without
      ``--config``, `Run.config` is then None.
    change: changes the config before it is checked.
  """
  needed = (
    {"workdir": _WORKDIR.value}
    if without_config
    else {"config": _CONFIG.value, "workdir": _WORKDIR.value}
  )
  require(argv, without_config or "--config=glyphs --workdir=runs/glyphs", **needed)
  with errors_as_messages():
    _join_processes(several_processes)
  if _CONFIG.value is None:
    return Run(None, _workdir())
  from soprc_jax.training import config as config_lib

  with errors_as_messages():
    if change is not None:
      change(_CONFIG.value)
    config = config_lib.resolve(_CONFIG.value)
  return Run(config, _workdir())


def _join_processes(allowed: bool) -> None:
  """Joins the other processes of the run, if the flags name any.

  Only process 0 then logs its progress.
  """
  given: dict[str, Any] = {
    "coordinator": _COORDINATOR.value,
    "num_processes": _NUM_PROCESSES.value,
    "process_id": _PROCESS_ID.value,
  }
  named = [name for name, value in given.items() if value is not None]
  if not (named or _DISTRIBUTED.value):
    return
  if not allowed:
    raise ValueError(
      f"{_command()} runs in one process: leave out --{(named or ['distributed'])[0]}"
    )
  if named and (len(named) < len(given) or _DISTRIBUTED.value):
    raise ValueError(
      "--coordinator, --num_processes and --process_id go together, without --distributed; got "
      + ", ".join(
        f"--{name}" for name in [*named, *(["distributed"] if _DISTRIBUTED.value else [])]
      )
    )
  if named and given["process_id"] >= given["num_processes"]:
    raise ValueError(
      f"--process_id={given['process_id']} must be below --num_processes={given['num_processes']}: "
      "the first process is 0"
    )
  from soprc_jax.training import parallel

  parallel.join_processes(**given)
  if not parallel.is_main():
    for own in _LOGGERS:
      logging.getLogger(own).setLevel(logging.WARNING)


def load_config(*, argument: str = "", change: Callable[[Any], None] | None = None) -> Any:
  """Loads the config file again, unresolved, with one more argument or a change.

  The overrides of the command line are applied last. Open keys take the values of `choose`.
  """
  from soprc_jax.training import config_key

  path, _, arguments = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
  joined = ",".join(filter(None, [arguments, argument]))
  config = runpy.run_path(path)["get_config"](*([joined] if joined else []))
  if change is not None:
    change(config)
  # Not `config_overrides`: a group replaces that of the file, as in the flag itself.
  config.update_from_flattened_dict(config_flags.get_override_values(flags.FLAGS["config"]))
  config.update_from_flattened_dict(
    {key: value for key, value in _chosen.items() if config_key.value_of(config, key) is None}
  )
  return config


# Values of the open keys in all configs of `load_config`, see `choose`.
_chosen: dict[str, Any] = {}


def choose(values: Mapping[str, Any]) -> None:
  """Sets the values of the open keys for `load_config`, so that all runs of a program share them.

  Args:
    values: dotted key -> value.
  """
  _chosen.update(values)


def config_arguments() -> list[str]:
  """Returns the arguments after the colon of ``--config=FILE:ARGUMENT[,ARGUMENT]``."""
  arguments = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")[2]
  return [argument for argument in arguments.split(",") if argument]


def config_name() -> str:
  """Returns the name of the config file with its argument, e.g. ``folder:small``.

  For files outside this project it is the path.
  """
  path, colon, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
  ours = Path(path).resolve().parent == _CONFIGS.resolve()
  return f"{Path(path).stem if ours else path}{colon}{argument}"


def config_overrides() -> dict[str, Any]:
  """Returns the keys that the command line overrides, with their values.

  A group, as in ``--config.loss.triplet={'margin': 0.3}``, gives each of its keys.
  """
  from soprc_jax.training import config_key

  given = config_flags.get_override_values(flags.FLAGS["config"])
  trees = {
    key: value.to_dict() if isinstance(value, config_dict.ConfigDict) else value
    for key, value in given.items()
  }
  return dict(config_key.leaves(trees))


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
  """Ends the process with a message, not a traceback, on errors the user can fix.

  The exit status is 1 for a wrong value or file, a full disk or a diverged training. It is 143 for
  SIGTERM and 130 for Ctrl-C; then the same command resumes the run.
  """
  try:
    yield
  except KeyboardInterrupt:
    _leave(
      "Interrupted: finished work is kept, and the same command resumes or starts again",
      128 + signal.SIGINT,
    )
  except (ValueError, OSError, ArithmeticError) as error:
    logging.getLogger("soprc_jax").debug("traceback", exc_info=True)
    _exit(_no_space(error) or str(error))
  except MemoryError as error:
    _exit(_out_of_memory(error))
  except Exception as error:
    if "RESOURCE_EXHAUSTED" in str(error):  # of XLA
      _exit(_out_of_memory(error))
    # Set by `interrupts.InterruptedRunError`; importing its module would load jax for every typo.
    status = getattr(error, "exit_status", None)
    if status is not None:
      _leave(str(error), status)
    if no_space := _no_space(error):  # from tensorstore, or from a process that loads images
      _exit(no_space)
    if not (isinstance(error, RuntimeError) and _is_one_of_several()):
      raise
    first_line = str(error).splitlines()[0]
    _exit(
      f"another process of the run has died or cannot be reached ({first_line}): start all of them "
      "again to resume"
    )


def _no_space(error: Exception) -> str:
  """Returns the message for a full disk that the error does not name, or an empty string.

  It says which place is full.
  """
  named = isinstance(error, OSError) and (error.errno is None or error.filename is not None)
  if named or "soprc_jax" not in sys.modules:  # which would load jax for every typo
    return ""
  from soprc_jax._internal import file_io

  if not file_io.is_full(error):
    return ""
  place = Path(flags.FLAGS["workdir"].value or ".").absolute()
  return f"no space is left in {file_io.what_is_full(error, place)}: free some ({error})"


def _out_of_memory(error: BaseException) -> str:
  first_line = (str(error).splitlines() or ["no memory left"])[0]
  return (
    f"out of memory ({first_line}): lower the sizes that the command was given. In training these "
    "are train.batch_size, train.microbatch, data.image_size, eval.batch_size, eval.block_size, "
    "and the sizes of the model and the loss (model.width, model.embedding_dim, loss.num_points, "
    "memory_size)"
  )


def vectors_bar(total: int) -> Any:
  """Returns a tqdm bar of vectors, which is seldom printed where there is no terminal."""
  from tqdm import tqdm

  seconds = 0.5 if sys.stderr.isatty() else 30.0
  return tqdm(total=total, unit=" vectors", unit_scale=True, mininterval=seconds)


def metrics_line(split: str, values: dict[str, Any]) -> str:
  """Returns the metrics in one line of text.

  For example ``test: mAUPRC 0.5012 [0.4880, 0.5144], recall@1 0.7301, ... (11738 queries)``.
  """
  limits = values.get("intervals", {})
  shown = [
    f"{name} {value:.4f}{interval(limits, name)}"
    for name, value in values.items()
    if isinstance(value, float)
  ]
  line = f"{split}: {', '.join(shown)} ({values['num_queries']} queries"
  if values["num_skipped"]:
    line += f", {values['num_skipped']} without a positive skipped"
  if values.get("num_broken"):
    line += f", {values['num_broken']} corrupt images left out"
  if values["ks_beyond_gallery"]:
    line += f", k beyond the gallery: {values['ks_beyond_gallery']}"
  return line + ")"


def interval(intervals: Mapping[str, Any], name: str) -> str:
  """Returns `` [low, high]`` of a metric, or "" if it has no interval."""
  return " [{:.4f}, {:.4f}]".format(*intervals[name]) if name in intervals else ""


def _command() -> str:
  """Returns the command of this program, ``soprc NAME``.

  In a checkout ``python -m experiments.NAME`` is the same.
  """
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  name = spec.name.removesuffix(".__main__").removeprefix("experiments.") if spec else "train"
  return f"soprc {name.replace('_', '-')}"


def _set_up_logging() -> None:
  """Sets up plain log lines for this project, and warnings only for other libraries."""
  for own in _LOGGERS:
    logger = logging.getLogger(own)
    if not logger.handlers:
      handler = logging.StreamHandler(sys.stderr)
      handler.setFormatter(_Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
      logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
  _prepare_matplotlib()
  for name in (None, "absl"):
    logging.getLogger(name).setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
  """Formats log lines so that no file name can control the terminal."""

  def format(self, record: logging.LogRecord) -> str:
    return _harmless(super().format(record))


def _harmless(message: str) -> str:
  """Escapes control characters except line ends; works without loading jax."""
  return "".join(
    one if one.isprintable() or one in "\n\u00a0" else ascii(one)[1:-1] for one in message
  )


def _prepare_matplotlib() -> None:
  """Gives matplotlib a folder if the user has no home.

  Otherwise it would create one for each process, and warn each time.
  """
  from soprc_jax._internal import cache

  if not cache.has_home() and "MPLCONFIGDIR" not in os.environ:
    with contextlib.suppress(OSError):
      os.environ["MPLCONFIGDIR"] = str(cache.file("matplotlib"))


def _exit(message: str) -> NoReturn:
  _leave(f"Error: {_harmless(message)}", 1)


def _leave(message: str, status: int) -> NoReturn:
  print(message, file=sys.stderr, flush=True)
  if _is_one_of_several():
    # A usual exit would wait for the other processes, which may be waiting for this one. The pause
    # gives them time to report their own errors.
    time.sleep(2)
    os._exit(status)
  sys.exit(status)


def _is_one_of_several() -> bool:
  return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()
