"""Training and evaluation of embedding networks: config, step, loop, checkpoints, devices."""
