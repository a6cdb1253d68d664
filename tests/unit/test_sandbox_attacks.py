"""Every attack of sandbox_attacks.py, in every mode this machine can be put into, and the README's table of them."""

import functools
import os

import pytest

from tests.unit.sandbox_attacks import ATTACKS, MODES, ROOT, rows, run_mode

IS_ROOT = os.geteuid() == 0
HERE = [mode for mode in MODES if IS_ROOT or mode.startswith("user")]


@functools.cache
def results(mode: str) -> dict:
    return run_mode(mode)


@pytest.mark.parametrize("mode", MODES)
def test_no_attack_works(mode):
    if mode not in HERE:
        pytest.skip(f"mode {MODES[mode]}: it takes root to try it")
    found = results(mode)
    assert "no network, only its own and the interpreter's files" in found["isolation"]
    if "namespaces=True" not in found["measures"] and mode in ("root", "user"):
        pytest.skip(f"mode {MODES[mode]}: this machine grants no namespaces")
    assert ("namespaces=True" in found["measures"]) == (mode in ("root", "user"))
    assert len(found["attacks"]) == len(ATTACKS) >= 60
    assert [name for name, tried in found["attacks"].items() if tried["inside"] == "worked"] == []
    assert {name: result for name, result in found["programs"].items() if result != "bounded"} == {}


# Parts of a kernel that distributions switch off or leave out; there they show nothing.
OFTEN_OFF = {
    *("make a user namespace", "make namespaces by clone", "make namespaces by clone3", "open a socket by a ring"),
    *("handle page faults", "load a filter into the kernel", "read the kernel's log", "make a message queue (POSIX)"),
}


@pytest.mark.parametrize("mode", ["root", "user"])
def test_without_the_sandbox_they_work(mode):
    """Else the attacks would show nothing. Where this fails on another kernel, the attack is to be mended."""
    if mode not in HERE:
        pytest.skip("it takes root to try it")
    able = ("anyone", "root") if mode == "root" else ("anyone",)
    attacks = {a.name: results(mode)["attacks"][a.name]["outside"] for a in ATTACKS if a.alone in able}
    assert {name: result for name, result in attacks.items() if result != "worked" and name not in OFTEN_OFF} == {}
    assert len(attacks) >= 55


def test_the_table_in_the_readme_is_what_they_did():
    text = (ROOT / "tests" / "README.md").read_text().partition("## Attacks on the sandbox")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == ["Attack", "without a sandbox", *MODES.values()]
    columns = [list(MODES).index(mode) + 2 for mode in HERE]
    assert [[line[0], line[1], *(line[i] for i in columns)] for line in lines[2:]] == rows(
        {mode: results(mode) for mode in HERE}
    )
    assert {cell for line in lines[2:] for cell in line[2:]} == {"denied", "bounded"}
