"""Embedding models in Flax Linen."""

from soprc_jax._internal.masks import l2_normalize
from soprc_jax.models.convnet import ConvNet
from soprc_jax.models.embedding import EmbeddingNet
from soprc_jax.models.head import HEADS, Head
from soprc_jax.models.resnet import RESNETS, ResNet
from soprc_jax.models.vit import ViT

__all__ = ["HEADS", "RESNETS", "ConvNet", "EmbeddingNet", "Head", "ResNet", "ViT", "l2_normalize"]
