"""Every attack of lockdown_attacks.py, by a program and by a confined reward process, in every mode of this machine."""

import functools
import os

import pytest

from grpo.workers.lockdown import missing_measures
from tests.unit.workers.lockdown_attacks import ATTACKS, HAS_PROGRAMS, MODES, run_mode

pytestmark = pytest.mark.skipif(bool(missing_measures()), reason=f"this kernel has no {missing_measures()}")

# Parts of a kernel that distributions switch off or leave out; there they show nothing.
OFTEN_OFF = {
    *("make a user namespace", "make namespaces by clone", "make namespaces by clone3", "open a socket by a ring"),
    *("handle page faults", "load a filter into the kernel", "read the kernel's log", "make a message queue (POSIX)"),
}
# A reward process may have as many threads as it likes.
OF_PROGRAMS = {"lift its limit on processes"}
# Root of a namespace is called root and gains nothing by it.
OF_THE_ROOTLESS = {"be root"}


@functools.cache
def results(mode: str) -> dict:
    if os.geteuid() != 0 and mode != "user":
        pytest.skip("it takes root to try it")
    try:
        return run_mode(mode)
    except RuntimeError as error:
        if mode == "rootless" and "unshare" in str(error):
            pytest.skip("this kernel makes no user namespaces for users")
        raise


@pytest.mark.parametrize("where", ["program", "worker"] if HAS_PROGRAMS else ["worker"])
@pytest.mark.parametrize("mode", MODES)
def test_no_attack_works(mode, where):
    found = results(mode)[where]
    harmless = (OF_PROGRAMS if where == "worker" else set()) | (OF_THE_ROOTLESS if mode == "rootless" else set())
    assert len(found) == len(ATTACKS) >= 110
    assert {name for name, tried in found.items() if tried == "worked"} <= harmless


@pytest.mark.skipif(not HAS_PROGRAMS, reason="grpo/features/programs is deleted")
@pytest.mark.parametrize("mode", MODES)
def test_every_program_is_bounded(mode):
    found = results(mode)["programs"]
    assert {name: result for name, result in found.items() if result != "bounded"} == {}


@pytest.mark.parametrize("mode", ["root", "user"])
def test_without_the_lockdown_they_work(mode):
    """Else the attacks would show nothing. Where this fails on another kernel, the attack is to be mended."""
    able = ("anyone", "root") if mode == "root" else ("anyone",)
    outside = results(mode)["outside"]
    attacks = {a.name: outside[a.name] for a in ATTACKS if a.alone in able}
    assert {name: result for name, result in attacks.items() if result != "worked" and name not in OFTEN_OFF} == {}
    assert len(attacks) >= 60
