"""What `import nanobatch` finds where a wheel is installed: one line that says how to reach the
engine.

The engine's modules have short names, such as `sched` and `kv`. They are not installed under them,
because they would stand in the way of others. Who wants them puts their folder first.
"""

import nanobatch_checkout

folder = next(iter(nanobatch_checkout.__path__))
raise ImportError(
    "the engine is imported from its own folder; put that first: "
    f"sys.path.insert(0, {folder!r}), and then `from nanobatch import Engine`"
)
