"""The web page of a run, with a scheduler that runs in the browser."""
