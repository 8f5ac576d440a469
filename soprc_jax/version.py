"""Version of the package, in a module that the build can read without importing jax."""

__version__ = "0.1.0"
