r"""Converts published weights to a checkpoint for --config.model.init_from and soprc embed.

soprc convert-weights --input=resnet50.pth --output=weights/resnet50

The input is a .pth file (needs torch; nothing in it is executed), a .safetensors file, or
hf://USER/REPOSITORY[/FILE] (needs huggingface_hub). The weights are those of a ResNet with the
names of torchvision, timm or Hugging Face, or those of the vision transformer of DINO, DINOv2,
DINOv3, CLIP or SigLIP with the names of timm or Hugging Face. For a vision transformer, config.json
and preprocessor_config.json next to the file are read too. init_from also accepts all of these
directly. A converted checkpoint needs neither package, and soprc embed --workdir=OUTPUT embeds
images with it.
"""

from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments import flags

_INPUT = absl_flags.DEFINE_string(
  "input", None, "Weights: FILE.pth, FILE.safetensors or hf://USER/REPOSITORY[/FILE]."
)
_OUTPUT = absl_flags.DEFINE_string(
  "output", None, "Folder of the checkpoint. It must contain no other checkpoint."
)


def main(argv: Sequence[str]) -> None:
  flags.require(
    argv, "--input=resnet50.pth --output=weights/resnet50", input=_INPUT.value, output=_OUTPUT.value
  )
  source = str(_INPUT.value)
  from soprc_jax._internal import file_io
  from soprc_jax.models import pretrained
  from soprc_jax.serving import converted
  from soprc_jax.training import workdir

  with flags.errors_as_messages():
    output = file_io.given(str(_OUTPUT.value), name="--output").absolute()
    workdir.check_files(output, workdir.WRITES, own="", name="--output")
    pretrained.check(source, name="--input")
    name = converted.write(source, output)
  model = "--config=folder:vit" if name == "vit" else f"--config.model.name={name}"
  print(
    f"Written to {output}. Train from it: {model} --config.model.init_from={output}\n"
    f"Embed images with it: soprc embed --workdir={output} --images=PHOTOS --output=vectors.npz"
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
