"""What is done with a trained network: embedding images, searching among them, exporting it."""
