"""A run writes into and deletes from its own folder only, alone, and begins there however the start before it ended."""

import errno
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from grpo.config import GRPOConfig, MetricsConfig
from grpo.config.recipes import as_recipe, load_recipe
from grpo.folder import run_folder
from grpo.folder.run_folder import RUN_FILES, begin_run, check_run_folder, read_marker
from grpo.report.log import RunLog, drop_steps_after
from grpo.text import replace_file
from tests import ROOT
from tests.unit.folder.room import largest_file

GRPO, SFT = "train_grpo.py", "train_sft.py"


def check(run_dir: str | pathlib.Path, script: str = GRPO, inputs: tuple[str, ...] = (), **flags: bool) -> None:
    check_run_folder(str(run_dir), script, inputs, **{"resume": False, "overwrite": False} | flags)


def begin(
    folder: str | pathlib.Path,
    script: str = GRPO,
    seed: int = 1,
    texts: dict[str, str] | None = None,
    **flags: bool,
) -> None:
    """Begin, as a process does that ends at once."""
    config = {"config.py": as_recipe(GRPOConfig(seed=seed))}
    os.close(begin_run(str(folder), script, {}, config | (texts or {}), **flags))


def seed_of(config: pathlib.Path) -> int:
    return load_recipe(str(config), GRPOConfig).seed


def started_run(folder: pathlib.Path, script: str = GRPO) -> pathlib.Path:
    """A folder as a run leaves it before its first step."""
    check(folder, script)
    begin(folder, script)
    return folder


def finished_run(folder: pathlib.Path, script: str = GRPO) -> pathlib.Path:
    started_run(folder, script)
    for name in ("metrics.jsonl", "completions.jsonl", "evaluation.jsonl", "metrics.jsonl.tmp"):
        (folder / name).write_text("{}\n")
    steps = ("checkpoints/step-00000003", "checkpoints/step-00000004.partial")
    for name in ("tensorboard", "model", "model.partial", "initial_model", *steps):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("")
    return folder


def tree(folder: pathlib.Path) -> set[str]:
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]  # which Python may write
    return {str(path.relative_to(folder)) for path in paths}


# ---- Whose folder


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}], ids=["plain", "resume", "overwrite"])
@pytest.mark.parametrize("run_dir", [ROOT / "grpo", ROOT, "/", pathlib.Path.home(), ".", ""])
def test_a_folder_with_other_files_is_refused(run_dir, flags, tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("")
    monkeypatch.chdir(tmp_path)  # so that "." is no empty folder
    if run_dir == pathlib.Path.home() and not any(run_dir.iterdir()):
        pytest.skip("this home is empty")
    with pytest.raises(ValueError, match=r"has files \(.*\) but no run.json.*choose another --run-dir"):
        check(run_dir, **flags)


def test_absent_and_empty_folders_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")  # a link to a larger disk, for example
    for name in ("empty", "link", "absent/deeper"):
        check(tmp_path / name)
    assert tree(tmp_path) == {"empty", "link"}  # nothing was changed
    started_run(tmp_path / "link")
    assert tree(tmp_path / "empty") == {"run.json", "run.lock", "config.py"}


def test_what_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for run_dir, message in {
        f"{tmp_path}/file": "file cannot be written: .*/file is not a writable folder.*--run-dir",
        f"{tmp_path}/file/run": "file/run cannot be written: .*/file is not a writable folder.*--run-dir",
        f"{tmp_path}/nowhere": "cannot be written: .*/nowhere is not a writable folder.*--run-dir",
        "/proc/nowhere": "/proc/nowhere cannot be written: /proc is not a writable folder.*--run-dir",  # for root too
        "~/runs": "run_dir ~/runs would be a folder named ~ .*HOME",  # as in --run-dir=~/runs
    }.items():
        with pytest.raises(ValueError, match=message):
            check(run_dir)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"script": 1}', '{"script": "train_grpo.py"}', "[" * 100_000, "\x00\xff"],
)
def test_another_run_json_is_no_marker(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="run.json.*choose another --run-dir"):
        check(tmp_path, overwrite=True)


def test_what_the_marker_says(tmp_path):
    marker = read_marker(started_run(tmp_path))
    assert marker["script"] == GRPO and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", marker["created"])
    assert list(marker["versions"]) == ["python", "torch", "torchtitan", "vllm", "transformers"]
    assert marker["versions"]["torch"].startswith("2.") and marker["versions"]["vllm"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?", marker["commit"])


def test_the_texts_are_those_of_what_ran_last(tmp_path):
    for seed, text in ((1, "a"), (2, "b")):
        begin(tmp_path, seed=seed, texts={"script.py": text, "files/mine.py": f"{text} reward"}, resume=seed > 1)
    assert seed_of(tmp_path / "config.py") == 2
    texts = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("[ms]*.py")}
    assert texts == {"script.py": "b", "files/mine.py": "b reward"}
    begin(tmp_path, overwrite=True)
    assert tree(tmp_path) == {"config.py", "run.json", "run.lock"}


def test_a_full_disk_names_the_file(tmp_path):
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=2)
    log.log(1, {"loss": 1.0})
    writes = {
        "run.lock": lambda: begin(tmp_path),
        "metrics.jsonl": lambda: log.log(2, {"loss": 1.0}),
        "metrics.jsonl.tmp": lambda: drop_steps_after(tmp_path / "metrics.jsonl", 1),
        "run.json": lambda: replace_file(tmp_path / "run.json", "{}"),
    }
    for file, write in writes.items():
        with largest_file(0), pytest.raises(OSError, match=f"{tmp_path}/{file}'"):
            write()


# What somebody may have put into a run's folder under the name of a file that a run writes
PLANTED = {
    "a link to a file": lambda path, victim: path.symlink_to(victim),
    "a link to nowhere": lambda path, victim: path.symlink_to(victim.with_name("absent")),
    "a hard link": lambda path, victim: os.link(victim, path),
    "a pipe": lambda path, victim: os.mkfifo(path),
    "a folder": lambda path, victim: path.mkdir(),
}


@pytest.mark.parametrize("is_run", [False, True], ids=["a stranger's folder", "a run's folder"])
@pytest.mark.parametrize("name", ["run.lock", "run.json.tmp", "run.json"])
@pytest.mark.parametrize("planted", PLANTED)
def test_links_and_pipes_are_refused_or_replaced_never_followed(planted, name, is_run, tmp_path):
    """Nothing outside of the folder changes, nothing waits for a pipe, and what is refused is refused in one line."""
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text('{"script": "train_grpo.py"}')
    if is_run:
        finished_run(folder)
    folder.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    PLANTED[planted](folder / name, victim)
    try:
        check(folder, overwrite=True)
        begin(folder, overwrite=True)
    except ValueError as refused:
        assert "choose another --run-dir" in str(refused) and "\n" not in str(refused)
    assert tree(tmp_path) - {"victim"} == {f"run{'/' if path else ''}{path}" for path in {"", *tree(folder)}}
    assert victim.read_text() == '{"script": "train_grpo.py"}'


# ---- One run at a time

HOLDER = """
import sys, time
from grpo.folder.run_folder import begin_run
begin_run(sys.argv[1], "train_grpo.py", {}, {})
print("held", flush=True)
time.sleep(600)
"""


def test_the_second_run_is_refused_and_the_folder_of_a_dead_one_is_free(tmp_path):
    environment = os.environ | {"SLURM_JOB_ID": "4711"}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert "held\n" in iter(other.stdout.readline, "")
        who = f"in use by another run .process {other.pid} on {socket.gethostname()}, job 4711, since .*"
        for take in (check, begin):
            with pytest.raises(ValueError, match=who) as refused:
                take(tmp_path)
            assert "\n" not in str(refused.value)
        # a hung process holds it, a killed one does not; nothing is left to clear away
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(ValueError, match=who):
            check(tmp_path)
        other.kill()
    check(tmp_path, resume=True)
    begin(tmp_path)
    assert f"process {os.getpid()} on " in (tmp_path / "run.lock").read_text()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def none(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", none)
    begin(tmp_path)
    assert "has no locks (Function not implemented)" in capsys.readouterr().out


# ---- Earlier runs


def test_an_earlier_run_is_continued_or_deleted_only_when_asked_for(tmp_path):
    finished_run(tmp_path)
    with pytest.raises(ValueError, match=r"earlier run \(metrics.jsonl, .*model\); .* --resume, .* --overwrite"):
        check(tmp_path)
    for script, flag in ((GRPO, "resume"), (GRPO, "overwrite"), (SFT, "overwrite")):
        check(tmp_path, script, **{flag: True})
    with pytest.raises(ValueError, match="run of train_grpo.py, .*train_sft.py cannot resume"):
        check(tmp_path, SFT, resume=True)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="finished run without checkpoints"):
        check(tmp_path, resume=True)
    check(tmp_path, overwrite=True)


@pytest.mark.parametrize(
    ("began", "name"),
    [
        (False, "run.lock"),
        (False, "initial_model"),
        (True, "initial_model"),
        (True, "config.py"),
        (True, "tensorboard"),
    ],
)
def test_a_start_that_was_refused_or_lost_while_models_loaded_does_not_block_the_next(tmp_path, began, name):
    if began:
        begin(tmp_path, SFT)
    (tmp_path / name).touch()
    check(tmp_path)
    check(tmp_path, resume=True)


def test_overwrite_deletes_what_runs_wrote_and_nothing_else(tmp_path):
    run = finished_run(tmp_path / "run")
    steps = {f"checkpoints/{name}" for name in ("best", "step-abcdefgh", "step-00000004.bak", "step-4")}
    theirs = steps | {"notes.md", "data.jsonl", "my_model", "config.py.orig", "config-step-2.py"}
    theirs |= {"checkpoints/step-00000004.partial.bak"}
    for name in theirs:
        (run / name).mkdir()
    begin(run, SFT, seed=2, overwrite=True)
    ours = {"checkpoints", "run.json", "run.lock", "config.py", "initial_model", "initial_model/file"}
    assert tree(run) == theirs | ours
    assert seed_of(run / "config.py") == 2 and read_marker(run)["script"] == SFT


def test_overwrite_leaves_what_links_lead_to(tmp_path):
    run = finished_run(tmp_path / "run")
    for name in ("model", "checkpoints"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    begin(run, overwrite=True)
    assert (tmp_path / "model/file").exists() and not (run / "model").is_symlink()
    assert tree(tmp_path / "checkpoints") == set()  # the checkpoints themselves were the run's


def test_a_folder_stays_a_runs_wherever_the_process_is_killed(tmp_path, monkeypatch):
    run = finished_run(tmp_path / "run")

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)  # while the earlier run was being deleted
    with pytest.raises(KeyboardInterrupt):
        begin(run, SFT, overwrite=True)
    assert not (run / "metrics.jsonl").exists() and read_marker(run)["script"] == GRPO


def test_resume_deletes_nothing_whatever_else_is_asked_for(tmp_path):
    before = tree(finished_run(tmp_path))
    begin(tmp_path, seed=2, resume=True, overwrite=True)
    gone = before - tree(tmp_path)  # what a run was writing when it was killed
    assert gone and all(".partial" in path or path.endswith(".tmp") for path in gone)


def test_a_run_does_not_replace_what_it_reads(tmp_path):
    finished_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run/model")
    (tmp_path / "run/rows.jsonl").write_text("")
    lost = ("run/model", "link", "run/initial_model", "run/completions.jsonl", "run/checkpoints/step-00000003/file")
    for path in (str(tmp_path / name) for name in lost):
        with pytest.raises(ValueError, match=f"^{path} lies in the run folder .* replace or delete it"):
            check(tmp_path / "run", GRPO, ("mine.py:rows", path), overwrite=True)
    kept = ("", "Qwen/Qwen3-1.7B", str(tmp_path / "run/rows.jsonl"), str(tmp_path / "run/model/absent"))
    check(tmp_path / "run", GRPO, kept, overwrite=True)
    check(tmp_path / "other", GRPO, (str(tmp_path / "run/model"),))


def test_run_files_are_listed_in_the_pages():
    page = (ROOT / "docs/run-folder.md").read_text()
    for name in RUN_FILES:
        assert f"| `{name}` |" in page or f"| `{name}/` |" in page, name
