"""The sandbox for dry runs, in several threads: nothing that the whole process shares is left changed."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from partita.dissolve._torch.sandbox import FakeSandbox

LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _shared(mode: FakeTensorMode) -> tuple[Any, ...]:
    return list(warnings.filters), LOGGER.level, list(LOGGER.filters), mode.allow_non_fake_inputs


def _overlapping(first: FakeSandbox, second: FakeSandbox) -> None:
    """Opens both in threads: the first is left while the second is open, if a second one can be open by then."""
    first_open, second_open, first_left = threading.Event(), threading.Event(), threading.Event()

    def run_first() -> None:
        with first.opened():
            first_open.set()
            second_open.wait(0.2)
        first_left.set()

    def run_second() -> None:
        assert first_open.wait(10)
        with second.opened():
            second_open.set()
            assert first_left.wait(10)

    threads = [threading.Thread(target=run) for run in (run_first, run_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_stages_that_meet_leave_the_process_as_it_was() -> None:
    mode = FakeTensorMode()
    value = mode.from_tensor(torch.ones(2))
    before = _shared(mode)
    _overlapping(FakeSandbox([value]), FakeSandbox([value]))
    assert _shared(mode) == before


def test_a_stage_can_be_opened_inside_another() -> None:
    mode = FakeTensorMode()
    value = mode.from_tensor(torch.ones(2))
    before = _shared(mode)
    with FakeSandbox([value]).opened(), FakeSandbox([value]).opened():
        pass
    assert _shared(mode) == before


def test_only_what_a_stage_logs_itself_goes_unheard(caplog: pytest.LogCaptureFixture) -> None:
    with FakeSandbox([]).opened():
        LOGGER.error("of the stage")
        other = threading.Thread(target=LOGGER.error, args=("of another thread",))
        other.start()
        other.join()
    LOGGER.error("of later")
    assert caplog.messages == ["of another thread", "of later"]


def test_other_threads_are_warned_while_a_stage_is_open() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with FakeSandbox([]).opened():
            other = threading.Thread(target=warnings.warn, args=("of another thread",))
            other.start()
            other.join()
    assert [str(warning.message) for warning in caught] == ["of another thread"]
