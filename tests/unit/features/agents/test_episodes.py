"""Episodes of agents with real processes and clients: what the engine was given is recorded; failures by cause."""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import sys

import pytest

from grpo import features
from grpo.config import DataConfig, EnvironmentConfig, GeneratorConfig, GRPOConfig, change
from grpo.features.agents import problems
from grpo.features.agents.episodes import Agents
from grpo.features.agents.process import load_agent
from grpo.features.environments.tools import load_toolboxes
from grpo.tools.check_environment import main as check_environment
from grpo.types import Piece, Prompt, Rollout
from grpo.watch.failures import BadInput
from tests import ROOT
from tests.unit import chat_templates as templates
from tests.unit.features.environments.test_turns_suffix import tokenizer_for

AGENTS = pathlib.Path(__file__).parent / "agents.py"
DEADLINES = {"reset_seconds": 600.0, "call_seconds": 600.0}  # of what must succeed on a busy machine
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SHELL = """
question=$(cat)
answer=$(curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -d '{"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 2}')
echo "$answer" "$question" >&2
echo "$answer" | grep -c chat.completion
"""

MINE = f"""
import sys
sys.path.insert(0, {str(AGENTS.parent)!r})
from agents import branches, rounds

def run(row, base_url, api_key, model):
    return branches({{"question": "hi"}}, base_url, api_key, model)

def calls(row, base_url, api_key, model):
    return rounds({{"question": "hi"}}, base_url, api_key, model)

def breaks(row, base_url, api_key, model):
    raise ValueError("mine")

def breaks_later(row, base_url, api_key, model):
    run(row, base_url, api_key, model)
    raise ValueError("later")
"""


class Engine:
    """In place of an engine: some of its requests end in each step, with random ids. Keeps what it was given."""

    def __init__(self, tokenizer, end: int):
        self.draw = random.Random(0)
        self.call_ids = tokenizer(CALL, add_special_tokens=False)["input_ids"]
        self.end_id = end
        self.given, self.said, self.running = {}, {}, {}

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, index: int, ids: list[int], number: int, max_tokens: int, turn) -> None:
        assert turn not in self.given
        self.given[turn] = ids
        self.running[turn] = max_tokens

    def step(self) -> dict:
        ended = {}
        for turn in [*self.running]:
            if self.draw.random() < 0.2:
                max_tokens = self.running.pop(turn)
                ids = self.draw.choices(range(60, 300), k=self.draw.randint(1, 6))
                if turn.body.get("tools") and self.draw.random() < 0.7:
                    ids += self.call_ids
                ids = [*ids, self.end_id][:max_tokens]
                logprobs = [-self.draw.random() for _ in ids]
                ended_by = "stop" if ids[-1] == self.end_id else "tokens"
                ended[turn] = Piece.sampled(ids, logprobs, 7, ended_by=ended_by)
        self.said |= ended
        return ended

    def end(self, turns) -> None:
        for turn in turns:
            self.running.pop(turn, None)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_for(templates.QWEN3)


@pytest.fixture
def plays(tokenizer, monkeypatch, tmp_path):
    """Plays the agent with each row, and checks what is recorded. Returns the rollouts and the engine."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:

        def play(agent: str, *rows: dict, **fields) -> tuple[list[Rollout], Engine]:
            environment = EnvironmentConfig(agent=agent, **{"max_turns": 200, "memory_gib": 4.0, **DEADLINES, **fields})
            config = GRPOConfig(
                data=DataConfig(max_prompt_tokens=3000),
                generator=GeneratorConfig(max_completion_tokens=1000),
                environment=environment,
            )
            assert not [*problems(config)]
            stops = tokenizer.convert_tokens_to_ids(templates.STOPS)
            agents = stack.enter_context(contextlib.closing(Agents(config, tokenizer, stops)))
            engine = Engine(tokenizer, stops[1])
            prompts = [(Prompt(number, [5, 6], row), 0) for number, row in enumerate(rows)]
            rollouts = agents.complete(engine, prompts, 1000, engine.add, run_seed=0, version=7, held_out=False)
            assert not engine.running and [rollout.prompt for rollout in rollouts] == [one for one, _ in prompts]
            check(rollouts, engine)
            return rollouts, engine

        yield play


def check(rollouts: list[Rollout], engine: Engine) -> None:
    """What the engine was given is the beginning of a recorded sequence; what it said is trained exactly once."""
    given = {tuple(ids) for ids in engine.given.values()}
    said = {tuple(piece.ids_T.tolist()) + tuple(piece.logprobs_T.tolist()) for piece in engine.said.values()}
    trained = []
    for rollout in rollouts:
        assert rollout.num_tokens == sum(turn["tokens"] for turn in rollout.episode["turns"])
        for pieces in rollout.sequences:
            ids = []
            for piece in pieces:
                if piece.is_sampled and piece.num_tokens:
                    assert tuple(ids) in given
                    turn = (*piece.ids_T.tolist(), *piece.logprobs_T.tolist())
                    assert turn in said and (piece.loss_mask_T.all() or turn in trained)
                    trained += [turn] * bool(piece.loss_mask_T.all())
                assert piece.is_sampled or not piece.loss_mask_T.any()
                ids += piece.ids_T.tolist()
    assert len(trained) == len(set(trained))
    assert len(trained) == sum(len(rollout.episode["turns"]) for rollout in rollouts)


def named(agent: str) -> str:
    pytest.importorskip("openai")  # comes with vLLM
    return f"{AGENTS}:{agent}"


def shapes(rollouts: list[Rollout]) -> set[tuple[int, int]]:
    """Numbers of turns and sequences."""
    return {(len(rollout.episode["turns"]), len(rollout.sequences)) for rollout in rollouts}


def test_many_episodes_of_a_client_with_a_tool(plays):
    rollouts, _ = plays(named("rounds"), *({"question": f"number {n}?"} for n in range(6)), num_processes=4)
    assert {(rollout.ended_by, rollout.episode["failure"]) for rollout in rollouts} == {("done", "")}
    assert shapes(rollouts) == {(3, 1)}
    for rollout in rollouts:
        assert rollout.episode["counts"]["calls"] == rollout.episode["reward"]
    assert sum(rollout.episode["reward"] for rollout in rollouts) > 6


@pytest.mark.parametrize(
    ("agent", "shape", "reward"),
    [
        ("forgets", (3, 2), None),
        ("branches", (4, 3), 1.0),
        ("many", (128, 128), 128.0),
        ("impatient", (3, 1), 1.0),
        ("hostile", (1, 1), 1.0),
    ],
)
def test_histories_that_branch_repeat_or_are_hostile(plays, agent, shape, reward):
    rollouts, engine = plays(named(agent), {"question": "what?"})
    assert (rollouts[0].ended_by, rollouts[0].episode["failure"]) == ("done", "")
    assert shapes(rollouts) == {shape} and rollouts[0].episode["reward"] == reward
    assert len(engine.given) == shape[0]  # no request was sampled twice


def test_the_endpoint_answers_also_when_its_process_has_more_than_1024_files_open(plays):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.enter_context(open(os.devnull))
        rollouts, _ = plays(f"{AGENTS}:fails", {"kind": "ends"})
    assert shapes(rollouts) == {(1, 1)}


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("jq"), reason="curl or jq is not installed")
def test_the_pages_script_sends_any_question_and_a_wrong_answer_is_no_failure(plays, tokenizer):
    script = (ROOT / "docs" / "agents.md").read_text().partition("```bash\n")[2].partition("```")[0]
    pathlib.Path("agent.sh").write_text(script)
    question = '"Why?"\nIt\'s 5\\6 $HOME `ls`.'
    rollouts, engine = plays("bash agent.sh", *({"question": question, "answer": answer} for answer in ("", "no")))
    assert [(rollout.ended_by, rollout.episode["reward"]) for rollout in rollouts] == [("done", 1.0), ("done", 0.0)]
    assert all(question in tokenizer.decode(ids) for ids in engine.given.values())


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_a_shell_script(plays):
    pathlib.Path("agent.sh").write_text(SHELL)
    (whole, limited), _ = plays("bash agent.sh", {"a": 1}, {"a": 2})
    for rollout in (whole, limited):
        assert rollout.episode["reward"] == 1.0 and rollout.episode["turns"][0]["tokens"] <= 2


def test_an_agent_that_leaves_something_ends_with_its_process_and_others_share_one(plays):
    whats = ["nothing", "thread", "nothing", "process", "nothing", "orphan", "nothing", "nothing"]
    rollouts, _ = plays(f"{AGENTS}:leaves", *({"what": what} for what in whats), num_processes=1)
    pids = [int(rollout.episode["reward"]) for rollout in rollouts]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4] == pids[5] != pids[6] == pids[7]
    assert not pathlib.Path(f"/proc/{pathlib.Path('orphan').read_text().strip()}").exists()


def test_the_examples_agent_offers_its_tool_as_a_run_with_turns_does():
    example = pytest.importorskip("configs.examples.gsm8k_agent")
    (toolbox,) = load_toolboxes(EnvironmentConfig(tools=("configs/examples/calculator.py:calculate",))).values()
    assert toolbox.schemas == [example.TOOL]


def test_an_agent_is_played_without_a_model_and_its_tree_is_shown(plays, capsys):
    named("branches")
    pathlib.Path("mine.py").write_text(MINE)
    assert check_environment(["mine.py:run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("reward 1.0; ended by done") == 3
    assert shown.count("sequence 0\n") == shown.count("sequence 2\n") == 3
    assert shown.count("\n> ") == 12 and shown.count("\n= ") == 6  # the first of four turns is in all sequences
    assert check_environment(["mine.py:calls", "--environment.max-turns", "3"]) == 0  # reads calls
    assert check_environment(["mine.py:breaks"]) == 1
    assert "lost ValueError: mine" in capsys.readouterr().out
    assert check_environment(["mine.py:breaks_later"]) == 0
    assert "ValueError: later" in capsys.readouterr().out
    program = pathlib.Path("mine_too.py").absolute()
    program.write_text("print(0.25)")
    assert check_environment([f"{sys.executable} {program}"]) == 0  # a command line, although a file's name ends it
    assert "reward 0.25; ended by done" in capsys.readouterr().out


def test_without_environments_nothing_answers_an_agent(monkeypatch):
    monkeypatch.setattr(features, "present", lambda: ["agents"])
    with pytest.raises(BadInput, match="needs grpo/features/environments, which this checkout lacks"):
        check_environment(["bash agent.sh"])


def test_causes_are_told_apart(plays):
    found = {}
    for seconds, kinds in (
        (600.0, ("raises first", "raises", "dies", "leaves")),
        (5.0, ["sleeps"]),
        (20.0, ["never stops"]),
    ):
        rows = [{"kind": kind} for kind in kinds]
        rollouts, _ = plays(f"{AGENTS}:fails", *rows, call_seconds=seconds, max_turns=4, hung_reward=-1.0)
        found |= zip(kinds, rollouts, strict=True)
    assert {kind: (rollout.ended_by, rollout.episode["reward"]) for kind, rollout in found.items()} == {
        "raises first": ("lost", None),  # before any answer of the policy
        "raises": ("hung", -1.0),
        "dies": ("hung", -1.0),
        "sleeps": ("hung", -1.0),
        "leaves": ("done", 0.5),
        "never stops": ("turns", -1.0),  # told of the limit first, then killed
    }
    assert "the agent's own bug" in found["raises first"].episode["failure"]
    assert "cannot read it" in found["raises"].episode["turns"][-1]["failed"]


def test_what_does_not_go_with_an_agent_is_refused():
    with pytest.raises(ValueError, match="no.py does not exist"):
        load_agent("no.py:run")
    plain = GRPOConfig(environment=EnvironmentConfig(agent="my.py:run"))
    wrong = [
        {"environment.tools": ("python",)},
        {"environment.rounds": True},
        {"algorithm.advantages": "return_to_go"},
        {"sampling.carry_over": 2},
        {"generator.stop": ("x",)},
        {"data.prompt_template": "{question}"},
    ]
    for changes in wrong:
        (name,) = changes
        (problem,) = problems(change(plain, changes))
        assert name in problem
