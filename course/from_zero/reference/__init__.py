"""Stages 9 to 12, written by us. `start.py` makes blank chapters of these files; no engine imports
them."""
