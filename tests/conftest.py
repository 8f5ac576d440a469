"""Strict session: two CPU devices, rank promotion raises, warnings are errors (setup.cfg), reproducible hypothesis."""

import os

# Before jax is imported anywhere: the device count is fixed when the backend starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("soprc", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("soprc")
