"""The page of a run, and the scheduler that runs in it."""
