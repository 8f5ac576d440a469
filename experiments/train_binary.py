"""Trains imbalanced binary classifiers by `experiments.binary`: ``soprc train-binary --help``."""

import runpy

if __name__ == "__main__":
  runpy.run_module("experiments.binary", run_name="__main__", alter_sys=True)
