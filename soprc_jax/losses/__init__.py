"""The losses that the paper compares SOPRC with: pure functions of embeddings and labels, one file a method."""

from soprc_jax.losses.triplet import triplet_loss

__all__ = ["triplet_loss"]
