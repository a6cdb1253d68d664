"""The peak of a GPU's memory while an engine sleeps and wakes, with torch's counters made by hand."""

import pytest
import torch

from grpo import metrics


class Counters:
    """Bytes that torch has allocated now and at most; it counts a sleeping engine's too."""

    def __init__(self) -> None:
        self.now = self.highest = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.highest = max(self.highest, self.now)

    def reset(self) -> None:
        self.highest = self.now


@pytest.fixture
def counters(monkeypatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: made.highest)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(metrics, "_peak", 0)
    monkeypatch.setattr(metrics, "_given_back", 0)
    return made


def test_what_a_sleeping_engine_gave_back_is_not_held(counters):
    counters.add(47)  # the engine
    counters.add(16)  # the trainer at rest
    assert metrics.peak_bytes() == 63
    for activations, peak in ((30, 63), (50, 66), (41, 66)):
        metrics.set_given_back(47)
        counters.add(activations)
        counters.add(-activations)
        assert metrics.peak_bytes() == peak  # 16 + activations, or 63 while the engine was awake
        metrics.set_given_back(0)
        assert metrics.peak_bytes() == peak
    counters.add(10)
    assert metrics.peak_bytes() == 73
