"""Nothing that looks like a test is passed over in silence: pytest leaves out folders by name, and so does ruff."""

import fnmatch
import tomllib

from tests import ROOT


def test_no_folder_of_tests_is_left_out():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    passed_over = settings["tool"]["pytest"]["ini_options"]["norecursedirs"]  # instead of pytest's own, with "dist"
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"tests/dist", "tests/e2e", "tests/unit"} <= {str(folder) for folder in folders}
    for folder in folders:
        assert not [part for part in folder.parts for pattern in passed_over if fnmatch.fnmatch(part, pattern)], folder


def test_every_test_file_stands_in_the_list_of_promises():
    page = (ROOT / "tests/README.md").read_text()
    names = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in names if f"]({name}) |" not in page] == []
