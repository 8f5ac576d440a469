"""Compares losses on imbalanced binary classification, over seeds (`experiments.binary`)."""

import runpy

if __name__ == "__main__":
  runpy.run_module("experiments.binary", run_name="__main__", alter_sys=True)
