"""Uses a trained model: embeds images, searches among them, and exports the model."""
