"""Modules that `bench.py` and `verify.py` use."""
