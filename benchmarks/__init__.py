"""The modules of `bench.py`."""
