"""Steps whose time is taken: one that fails is no figure."""

from __future__ import annotations

from pico_vllm.engine.engine import Engine
from pico_vllm.errors import PicoError
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason


def measured_step(engine: Engine) -> StepEvents:
    """The engine's step.

    Raises:
        PicoError: it ended a request with an error.
    """
    events = engine.step()
    if FinishReason.ERROR in events.finish_reasons:
        raise step_error(engine)
    return events


def step_error(engine: Engine) -> PicoError:
    return PicoError(
        f"a step failed while it was measured: {engine.last_failure}; run again with --debug to "
        "see where"
    )
