"""Each public name of 0.5 still works and warns."""

import pytest

import ask
import nanobatch
from engine.snapshot import Metrics, StepView
from nanobatch import Engine, SamplingParams

NONE = dict.fromkeys(Metrics.__dataclass_fields__)


def test_sampling_is_sampling_params():
    with pytest.warns(DeprecationWarning, match=r"nanobatch\.Sampling is now SamplingParams.*0\.7"):
        from nanobatch import Sampling
    assert isinstance(SamplingParams(), Sampling) and isinstance(Sampling(), SamplingParams)
    with pytest.raises(AttributeError, match="no attribute 'Samplng'"):
        _ = nanobatch.Samplng


@pytest.mark.parametrize(
    ("old", "value", "attribute", "new"),
    [("guesses", 3, "_speculate", "speculate"), ("reuse", False, "prefix_cache", "prefix_cache")],
)
def test_options_of_the_engine_and_of_submit(parts, old, value, attribute, new):
    with pytest.warns(DeprecationWarning, match=f"{old}= is now {new}=.*0.7") as warned:
        engine = Engine(*parts, slots=1, max_len=192, chunk=32, **{old: value})
    assert warned[0].filename == __file__, "the warning names the caller's line"
    with engine:
        assert getattr(engine, attribute) == value
        with pytest.warns(DeprecationWarning, match=f"{old}= is now {new}="):
            handle = engine.submit([1, 2], **{old: False})
        handle.cancel()
    assert handle.request.draft_source is None or not handle.request.prefix_cache


def test_attributes_of_the_engine(engine):
    with pytest.warns(DeprecationWarning, match="exact is now is_batch_invariant"):
        assert engine.exact == engine.is_batch_invariant
    with pytest.warns(DeprecationWarning, match="reuse is now prefix_cache"):
        assert engine.reuse is engine.prefix_cache
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'nothing'"):
        _ = engine.nothing


def test_attributes_of_metrics_and_steps(engine):
    metrics = Metrics(**NONE | {"draft_tokens": 5, "accepted_tokens": 3})
    with pytest.warns(DeprecationWarning, match="guessed is now draft_tokens"):
        assert metrics.guessed == 5
    with pytest.warns(DeprecationWarning, match="right is now accepted_tokens"):
        assert metrics.right == 3
    engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    step: StepView = engine.snapshot().steps[0]
    with pytest.warns(DeprecationWarning, match="guesses is now drafts"):
        assert step.guesses is step.drafts


def test_the_flag_guesses(capsys):
    """A user of the command line sees no DeprecationWarning, so it is a line."""
    assert ask.parse_arguments(["--guesses", "4", "hello"]).speculate == 4
    assert capsys.readouterr().err == (
        "nanobatch: --guesses is now --speculate; the old name goes in 0.7\n"
    )
    assert ask.parse_arguments(["--speculate", "4", "hello"]).speculate == 4
    assert not capsys.readouterr().err
