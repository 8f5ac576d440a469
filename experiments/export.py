r"""Exports the model of a training run to a file for other programs.

FILE.json, next to it, describes how to use the file.

soprc export --workdir=runs/mine --format=stablehlo --output=network.stablehlo [--checkpoint=best]
soprc export --workdir=runs/mine --format=onnx --output=network.onnx
soprc export --workdir=runs/mine --format=safetensors --output=network.safetensors

* stablehlo: a function from [b, S, S, 3] uint8 RGB pixels to [b, D] embeddings, any b, for CPUs,
  GPUs and TPUs. jax.export.deserialize reads it; nothing of this library is needed;
* onnx: the same function for onnxruntime; needs jax2onnx (pip install -e '.[onnx]');
* safetensors: the weights of a ResNet-18, -34, -50 or -101 with torchvision's names, the embedding
  head as its last layer, fc.
"""

from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.declare_key_flag("config")
absl_flags.declare_key_flag("workdir")
_FORMAT = absl_flags.DEFINE_enum(
  "format", "stablehlo", ["stablehlo", "safetensors", "onnx"], "Format of the file."
)
_OUTPUT = absl_flags.DEFINE_string("output", None, "File to write; must not exist.")
_CHECKPOINT = absl_flags.DEFINE_enum(
  "checkpoint", "best", ["best", "newest"], "Checkpoint: best validation mAUPRC, or newest."
)


def main(argv: Sequence[str]) -> None:
  example = "--workdir=runs/mine --format=stablehlo --output=network.stablehlo"
  run = flags.read(argv, without_config=example)
  flags.require(argv, example, output=_OUTPUT.value)
  from soprc_jax._internal import file_io
  from soprc_jax.serving import export, index, network

  with flags.errors_as_messages():
    output = file_io.given(str(_OUTPUT.value), name="--output")
    index.check_output(output)
    found = network.load(run.workdir, run.config, newest=_CHECKPOINT.value == "newest")
    described = export.write(output, found, _FORMAT.value)
  print(
    f"Written to {output} ({output.stat().st_size / 2**20:.1f} MiB): step {found.step} of "
    f"{run.workdir}"
  )
  print(f"How to load and call it: {described}")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
