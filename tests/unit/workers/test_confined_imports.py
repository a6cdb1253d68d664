"""What the driver can import, a confined reward process can, wherever the package lies; and it reads nothing else."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from grpo.workers.lockdown import missing_measures
from tests.unit.workers import confined_imports
from tests.unit.workers.lockdown_attacks import MODES, ROOT, USER

pytestmark = pytest.mark.skipif(bool(missing_measures()), reason=f"this kernel has no {missing_measures()}")


def put_package(folder: pathlib.Path) -> pathlib.Path:
    """Make the package, closed to others. A part of it is imported when it is called."""
    package = folder / "far_away"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def value():\n    from far_away import late\n    return late.VALUE\n")
    (package / "late.py").write_text("VALUE = 42\n")
    for path in (folder, package):
        path.chmod(0o700)
    return package


# Where the package lies: what puts it there, given the home folder and the environment's folder of packages. They
# return variables of the environment.


def in_the_environment(home: pathlib.Path, packages: pathlib.Path) -> dict[str, str]:
    put_package(packages)
    return {}


def on_pythonpath(home: pathlib.Path, packages: pathlib.Path) -> dict[str, str]:
    put_package(home / "site")
    return {"PYTHONPATH": f"/nowhere:{home}/site"}


def on_a_relative_pythonpath(home: pathlib.Path, packages: pathlib.Path) -> dict[str, str]:
    put_package(home / "site")
    return {"PYTHONPATH": "../site"}


def in_an_archive(home: pathlib.Path, packages: pathlib.Path) -> dict[str, str]:
    put_package(home / "site")
    shutil.make_archive(str(home / "packed"), "zip", home / "site")
    return {"PYTHONPATH": f"{home}/packed.zip"}


def in_the_users_site(home: pathlib.Path, packages: pathlib.Path) -> dict[str, str]:
    put_package(home / ".local" / packages.relative_to(home / "env"))
    configuration = home / "env" / "pyvenv.cfg"
    configuration.write_text(configuration.read_text().replace("packages = false", "packages = true"))
    return {}


def behind_a_pth_file(home: pathlib.Path, packages: pathlib.Path) -> dict[str, str]:
    put_package(home / "project" / "src")
    (packages / "far_away.pth").write_text(f"{home}/project/src\n")
    return {}


PLACES = (in_the_environment, on_pythonpath, on_a_relative_pythonpath, in_an_archive, in_the_users_site)
PLACES += (behind_a_pth_file,)


@pytest.fixture
def home():
    """A home folder of mode 700 with an environment, a working folder, and files that must stay closed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        home = pathlib.Path(folder) / "home"
        for name in ("work/data", ".ssh/key", "project/data", "run/checkpoint"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text("secret")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "env"], check=True)
        (home / "link").symlink_to(home / "env")
        home.chmod(0o700)
        yield home


def tried(home: pathlib.Path, mode: str, variables: dict[str, str]) -> dict:
    """What confined_imports.py prints in the environment, which is named by a link to it."""
    if os.geteuid() != 0 and mode != "user":
        pytest.skip("it takes root to try it")
    if os.geteuid() == 0:  # root too finds homes that are another user's, in containers
        subprocess.run(["chown", "-R", f"{USER}:{USER}", home], check=True)
    closed = [str(home / name) for name in ("work/data", ".ssh/key", "project/data", "run/checkpoint")]
    command = [str(home / "link/bin/python"), confined_imports.__file__, *closed]
    program = (
        "import os; from tests.unit.workers.lockdown_attacks import enter\n"
        f"enter({mode!r}); os.chdir({str(home / 'work')!r})\n"
        f"os.execve({command[0]!r}, {command!r}, {dict(HOME=str(home), PATH=os.environ['PATH'], **variables)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Every place as one user, and as every user the place that is hardest to find; all of them together are slow
EVERYDAY = {(place, MODES[-1]) for place in PLACES} | {(behind_a_pth_file, mode) for mode in MODES}
CASES = [
    pytest.param(place, mode, marks=() if (place, mode) in EVERYDAY else pytest.mark.slow)
    for place in PLACES
    for mode in MODES
]


@pytest.mark.parametrize(("place", "mode"), CASES)
def test_what_the_driver_imports_a_confined_process_imports(place, mode, home):
    packages = next(home.glob("env/lib/python3*/site-packages"))
    variables = place(home, packages)
    assert tried(home, mode, variables) == {"driver": 42, "imports": 42, "reads": [], "program": "42\n"}


@pytest.mark.parametrize("path", ["{home}", "", "/:{home}/work"])
def test_a_home_or_working_folder_on_the_path_stays_closed(path, home):
    put_package(home)
    (home / "work" / "far_away").symlink_to(home / "far_away")
    mode = "root" if os.geteuid() == 0 else "user"
    found = tried(home, mode, {"PYTHONPATH": path.format(home=home)})
    assert found["imports"] in ("ModuleNotFoundError", "PermissionError")
    assert (found["reads"], found["program"]) == ([], "42\n")
