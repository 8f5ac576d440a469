"""Training and evaluation of embedding models: config, step, loop, checkpoints, devices."""
