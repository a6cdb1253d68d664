"""An engine that is made up hands out what it sampled, with the experts of each token."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from grpo.roles.engine.loop import EngineLoop
from grpo.roles.engine.shortcuts import RequestTokens


@pytest.mark.parametrize(
    ("num_fed", "num_cached", "num_behind", "places"),
    [
        (0, 0, 0, [0, 1, 2, 3, 4, 5, 6]),  # a prompt of 5 tokens, and 3 that were sampled
        (2, 0, 0, [1, 2, 3, 4, 5, 6]),  # the first two have theirs
        (2, 1, 0, [1, 2, 3, 4, 5, 6]),  # and the engine had the first in its cache
        (2, 0, 2, [1, 2, 3, 4, 5, 6]),  # and sampled two more, behind a stop text
    ],
)
def test_a_token_has_the_experts_of_the_place_before_it(monkeypatch, num_fed, num_cached, num_behind, places):
    """Where it was predicted. The row of a place has its number; the last token is fed to nothing."""
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    taken = RequestTokens([7, 8, 9, 4, 4][: 3 + num_behind], [-1.0] * (3 + num_behind))
    rows = np.arange(num_cached, 5 + 2 + num_behind, dtype=np.uint8)[:, None, None]
    taken.routes = [rows[: 5 - num_cached], *np.split(rows[5 - num_cached :], 2 + num_behind)]
    loop = EngineLoop.__new__(EngineLoop)  # without vLLM
    output = SimpleNamespace(request_id="0", outputs=[SimpleNamespace(token_ids=[7, 8, 9], finish_reason="stop")])
    loop.engine = SimpleNamespace(add_request=lambda name, *_: name, step=lambda: [output])
    loop.routes, loop.sampled_tokens = SimpleNamespace(), SimpleNamespace(take=lambda _: taken)
    loop._names, loop._running = iter("0"), {}
    loop.add("request", [1, 2, 3, 4, 5], SimpleNamespace(), num_fed)
    (stretch,) = loop.step()
    assert stretch.ids == [7, 8, 9] and stretch.routes_TLE.flatten().tolist() == places
