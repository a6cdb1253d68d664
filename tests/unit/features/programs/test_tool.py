"""The tool `python`: what the model reads of its program."""

import pytest

from grpo import features
from grpo.config import EnvironmentConfig
from grpo.workers import kernel

pytestmark = pytest.mark.skipif(not kernel.can_deny_calls(), reason="this kernel filters no system calls")


def test_python():
    make = features.offers("TOOLS")["python"]
    python = make(EnvironmentConfig(call_seconds=600.0))
    assert python("print(6 * 7)") == "42\n"
    said = python("print(1)\n1 / 0")
    assert said.startswith('1\nTraceback (most recent call last):\n  File "program.py", line 2')
    assert said.endswith("ZeroDivisionError: division by zero")
    assert python("open('/etc/passwd')").count("PermissionError") == 1
    assert make(EnvironmentConfig(call_seconds=1.0))("while True: pass") == "It took longer than 0.8 s."
