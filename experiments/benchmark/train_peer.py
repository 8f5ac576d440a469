"""The training step of `train` in torch.

It is torchvision's ResNet-50 with frozen batch norm, and SOPRC with the default preset.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from experiments.benchmark import peers
from soprc_jax.models import embedding, pretrained


class Bottleneck(nn.Module):
  """1x1, 3x3 with the stride, and 1x1 convolutions to four times the width.

  The names of the layers are torchvision's.
  """

  def __init__(self, width_in: int, width: int, stride: int):
    super().__init__()
    self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
    self.bn1 = nn.BatchNorm2d(width)
    self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
    self.bn2 = nn.BatchNorm2d(width)
    self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
    self.bn3 = nn.BatchNorm2d(4 * width)
    self.downsample: nn.Module = nn.Identity()
    if stride > 1 or width_in != 4 * width:
      self.downsample = nn.Sequential(
        nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
      )

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = torch.relu_(self.bn1(self.conv1(x)))
    y = torch.relu_(self.bn2(self.conv2(y)))
    y = self.bn3(self.conv3(y))
    return torch.relu_(y + self.downsample(x))


class Embedder(nn.Module):
  """Maps uint8 images ``[B, H, W, 3]`` to unit-norm embeddings ``[B, 512]``.

  The names of the layers are torchvision's.
  """

  def __init__(self) -> None:
    super().__init__()
    self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
    self.bn1 = nn.BatchNorm2d(64)
    width_in = 64
    for stage, num_blocks in enumerate((3, 4, 6, 3)):
      blocks = []
      for index in range(num_blocks):
        blocks.append(Bottleneck(width_in, 64 * 2**stage, 2 if stage and not index else 1))
        width_in = 256 * 2**stage
      self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
    self.fc = nn.Linear(2048, 512)
    self.mean = torch.tensor(embedding.IMAGE_MEAN)[:, None, None]
    self.std = torch.tensor(embedding.IMAGE_STD)[:, None, None]

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    x = (images.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
    x = functional.max_pool2d(torch.relu_(self.bn1(self.conv1(x))), 3, 2, 1)
    for stage in range(4):
      x = self.get_submodule(f"layer{stage + 1}")(x)
    return functional.normalize(self.fc(x.mean((2, 3))))


def embedder(variables: Any) -> Embedder:
  """Returns the model with the weights of an `EmbeddingNet`, in torch's fastest layout.

  ``variables`` is ``{"params": ..., "batch_stats": ...}``.
  """
  net = Embedder().eval()  # frozen batch norm uses the running statistics; scale and bias train
  for name, tensor in net.state_dict().items():
    if name.endswith("num_batches_tracked"):
      continue
    collection, path = pretrained._flax_path(name)
    leaf = variables[collection]
    for key in path:
      leaf = leaf[key]
    array = np.array(leaf)
    array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
    tensor.copy_(torch.from_numpy(array.copy()))
  return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Step:
  """One step of SOPRC and SGD, like `soprc_jax.training.step.train_step`.

  It uses the default preset.

  Args:
    net: an `Embedder`, possibly compiled.
    images: ``[B, H, W, 3]`` uint8.
    labels: ``[B]`` rows of v, each class ``per_class`` times in a row.
    per_class: images of each class.
    priors: ``[C]`` prior of each class.
    config: resolved config, of which ``loss`` and ``optim`` are read.
  """

  def __init__(
    self,
    net: Any,
    images: np.ndarray,
    labels: np.ndarray,
    per_class: int,
    priors: np.ndarray,
    config: Any,
  ):
    self._net, self._loss = net, config.loss
    # as_tensor follows torch.device as a context, from_numpy does not.
    self._images = torch.as_tensor(images.copy())
    self._classes = torch.as_tensor(labels[::per_class].astype(np.int64))
    self._per_class, self._priors = per_class, torch.as_tensor(priors)
    self._v = torch.zeros(len(priors), config.loss.num_points)
    self._weight = torch.zeros(len(priors))
    optim = config.optim
    self._optimizer = torch.optim.SGD(
      net.parameters(),
      lr=optim.learning_rate,
      momentum=optim.momentum,
      weight_decay=optim.weight_decay,
    )

  def __call__(self) -> float:
    """Takes the step and returns its loss."""
    loss = self._soprc(self._net(self._images))
    self._optimizer.zero_grad()
    loss.backward()
    self._optimizer.step()
    return loss.item()

  def _soprc(self, embeddings: torch.Tensor) -> torch.Tensor:
    count, k = len(embeddings), self._per_class
    scores = (embeddings @ embeddings.T).reshape(count // k, k, count // k, k)
    same = (
      torch.eye(count // k, dtype=torch.bool)[:, None, :, None]
      .expand(scores.shape)
      .reshape(count, count)
    )
    flat = scores.reshape(count, count)
    positive = flat[same & ~torch.eye(count, dtype=torch.bool)].reshape(count, k - 1)
    negative = flat[~same].reshape(count, count - k)
    v = self._carry(positive.detach()).repeat_interleave(k, 0)
    prior = self._priors[self._classes].repeat_interleave(k)[:, None]
    false_rate = peers.huber(positive[:, :, None] - negative[:, None, :], self._loss.tau1).mean(-1)
    hits = torch.tanh(
      torch.relu(v[:, None, :] - positive.detach()[:, :, None]) / (2 * self._loss.tau2)
    ).mean(-1)
    own = 1 / (v.shape[-1] + 1)
    false_part, true_part = (1 - prior) * false_rate, prior * ((1 - own) * hits + own)
    risk = (false_part / (false_part + true_part)).mean()
    return risk + self._loss.lambda1 * _half(positive, -1) + self._loss.lambda2 * _half(negative, 1)

  def _carry(self, positive: torch.Tensor) -> torch.Tensor:
    """Returns v of the batch's classes (Eq. 10), ``[B / k, M]``, updated with the scores."""
    phi = (
      _interpolate(positive, self._v.shape[1])
      .reshape(len(self._classes), self._per_class, -1)
      .mean(1)
    )
    weight = (1 - self._loss.beta) * self._weight[self._classes] + self._loss.beta
    v = self._v[self._classes]
    v = v + (self._loss.beta / weight)[:, None] * (phi - v)
    self._v[self._classes], self._weight[self._classes] = v, weight
    return v


def _half(scores: torch.Tensor, sign: int) -> torch.Tensor:
  """Computes the mean square of the scores on one side of their mean (Eq. 9)."""
  excess = torch.relu(sign * (scores - scores.mean()))
  return excess.square().sum() / (excess > 0).sum().clamp(min=1)


def _interpolate(scores: torch.Tensor, num_points: int) -> torch.Tensor:
  """Computes phi of each list at midpoints (Alg. 2), ``[B, M]``."""
  u, n = scores.sort(-1).values, scores.shape[-1]
  below = torch.minimum((2 * u[:, :1] - u[:, 1:2]).clamp(min=-1), u[:, :1])
  above = torch.maximum((2 * u[:, -1:] - u[:, -2:-1]).clamp(max=1), u[:, -1:])
  extended = torch.cat([below, u, above], -1)
  middle = (extended[:, 1:] + extended[:, :-1]) / 2
  position = (torch.arange(num_points) + 0.5) / num_points * n
  segment = position.long().clamp(max=n - 1)
  return middle[:, segment] + (position - segment) * (middle[:, segment + 1] - middle[:, segment])
