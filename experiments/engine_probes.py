"""What a viewer may measure on an engine between two steps: the machine's roofline, and which experts
the newest step took. The thread that steps the engine calls these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.snapshot import ExpertsView
from experiments.roofline import measure
from kernels.device import device_lock, device_stream
from models.forward_cost import Roof

if TYPE_CHECKING:
    from nanobatch import Engine


def measure_roofline(engine: Engine, others: float = 0.0) -> None:
    """Measure how fast this machine reads and multiplies at most. Later snapshots have the result.

    `others`: the number of cores that other programs take meanwhile, as far as that is known.
    """
    model = engine.model
    with device_lock, device_stream():
        found = Roof(*measure(model.cost.nbytes, model.dtype), others)
    engine.registry.roof = engine.registry.roof.joined(found)


def chosen_experts(engine: Engine) -> ExpertsView:
    """Which experts the newest step takes, layer by layer."""
    choices = engine.model.choices
    with device_lock, device_stream():
        layers = choices.read() if choices else ()
    return ExpertsView(engine.sched.steps, tuple(tuple(each.most_common()) for each in layers))
