"""Episodes on an engine that is made up: ids only grow, limits end them, and counts hide how fast a tool was."""

import dataclasses
import functools
import pickle
import random
import time

import pytest
import torch

from configs.examples.toys import trained_tokenizer
from grpo.config import DataConfig, EnvironmentConfig
from grpo.data.batches import make_batch, sample_of
from grpo.environments.play import Episode, Player, num_at_once, play
from grpo.environments.suffix import Turns
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.roles.engine.episodes import completion_of, environment_seed
from grpo.roles.engine.loop import Stretch
from grpo.types import Prompt
from tests.unit import chat_templates as templates

CONFIG = EnvironmentConfig(name="made.py:Up", max_turns=4)
NUM = 12


@functools.cache
def tokenizer():
    return trained_tokenizer(["some words to cut", "and others"], 300)


class MadeHost:
    """Environments in this process; a reply is there after `delay()` seconds."""

    def __init__(self, delay, fails=(), fails_at="turn", role=""):
        self.role = role
        self.delay, self.fails, self.waiting, self.texts, self.fails_at = delay, fails, [], {}, fails_at
        self.opened_thoughts = set()

    def ask(self, episode, do, arguments, seconds):
        reply = {"text": f"Begin {episode}."}
        if do == "turn":
            self.opened_thoughts.add(arguments[2])
            self.texts.setdefault(episode, []).append(arguments[0])
            answer = f"<|im_start|>{len(arguments[0])}"
            reply = {"answers": [answer], "role": self.role}
            reply |= {"counts": {"calls": 1}, "ended": len(arguments[0]) % 7 == 0}
        elif do == "finish":
            reply = {"reward": float(episode), "info": {}}
        if do == self.fails_at and episode in self.fails:
            reply = {"failed": "it died", "kind": self.fails[episode]}
        self.waiting.append((time.monotonic() + self.delay(), reply | {"episode": episode}))

    def poll(self, seconds=0.0):
        end = time.monotonic() + seconds
        while not (there := [w for w in self.waiting if w[0] <= time.monotonic()]) and time.monotonic() < end:
            time.sleep(0.001)
        self.waiting = [w for w in self.waiting if w not in there]
        return [reply for _, reply in there]

    def drop(self, episode):
        pass


class FewProcesses(MadeHost):
    """An episode keeps one of five processes until it ends, and the others wait for one."""

    NUM = 5

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held, self.queue = set(), []

    def ask(self, episode, do, *arguments):
        if do == "reset" and len(self.held) == self.NUM:
            self.queue.append((episode, do, *arguments))
            return
        self.held.add(episode)
        super().ask(episode, do, *arguments)
        if do == "finish":
            self.drop(episode)

    def drop(self, episode):
        self.held.discard(episode)
        if self.queue and len(self.held) < self.NUM:
            self.ask(*self.queue.pop(0))

    def poll(self, seconds=0.0):
        assert self.waiting or not seconds, "all wait for each other"
        return super().poll(seconds)


class MadeLoop:
    """Samples 2 to 9 tokens that follow from the ids before, and the stop token, or `length` at the limit."""

    def __init__(self):
        self.running, self.log = {}, []

    @property
    def num_running(self):
        return len(self.running)

    def add(self, number, ids, num_behind, max_tokens):
        draw = random.Random(str(ids))
        sampled = draw.choices(range(10, 260), k=draw.randint(2, 9)) + [tokenizer().eos_token_id]
        self.running[number] = [sampled[:max_tokens], max_tokens < len(sampled), 0]
        self.log.append((number, tuple(ids), num_behind))

    def step(self):
        ended = []
        for number, (sampled, is_cut, done) in list(self.running.items()):
            self.running[number][2] = done + 1
            if done + 1 == len(sampled):
                del self.running[number]
                ended.append(Stretch(number, sampled, [-1.0] * len(sampled), "length" if is_cut else "stop"))
        self.log.append(sorted(self.running))
        return ended


def run(config, delay=lambda: 0.0, max_tokens=200, fails=(), fails_at="turn", host=MadeHost, first=None):
    """Play NUM episodes; returns them, what the engine was given, and the decisions that other ranks would hear."""
    eos = tokenizer().eos_token_id
    turns = Turns(tokenizer(), DataConfig(system_prompt=""), [eos], [], has_reply=True)
    player = Player(config, host(delay, fails, fails_at), {"": turns}, tokenizer(), 100)
    player.begin([Episode(Prompt(n, [11, 12]), 0, n, 3) for n in range(NUM)], max_tokens, num_first=first)
    loop, told = MadeLoop(), []

    def tell(decisions):
        told.append(pickle.loads(pickle.dumps(decisions)))
        return decisions

    play(config, loop, NUM, loop.add, player, tell, first)
    follower = MadeLoop()  # a rank that only hears
    heard = iter(told)
    play(config, follower, NUM, follower.add, None, lambda _: next(heard), first)
    assert follower.log == loop.log
    return player.finish(), loop.log


def test_ids_only_grow_and_only_what_was_sampled_counts():
    episodes, log = run(CONFIG)
    assert {episode.ended_by for episode in episodes} >= {"done", "turns"}
    for number, episode in enumerate(episodes):
        handed = [entry[1] for entry in log if isinstance(entry, tuple) and entry[0] == number]
        for before, after in zip(handed, handed[1:], strict=False):
            assert after[: len(before)] == before
        completion = completion_of(episode, 1.0, number)
        (completion,) = unflatten_completions(flatten_completions([completion]))
        sample = sample_of(episode.prompt, completion)
        assert tuple(sample.ids_T.tolist())[: len(handed[-1])] == handed[-1]  # trained on what the engine was given
        assert sample.ids_T.tolist() == episode.ids
        assert sample.loss_mask_T.sum() == completion.num_tokens == sum(turn["tokens"] for turn in episode.turns)
        assert (sample.generator_logprobs_T[sample.loss_mask_T] == -1).all()
        opener = tokenizer().convert_tokens_to_ids("<|im_start|>")  # also in the text of each answer, where it is none
        assert (sample.ids_T[~sample.loss_mask_T] == opener).sum() == 2 * len(episode.turns)
        assert completion.episode["reward"] == float(number) and completion.version == 3
    batch = make_batch([sample_of(e.prompt, completion_of(e, 1.0, 0)) for e in episodes])
    assert batch.versions_S.tolist() == [3] * NUM


def test_an_answer_joins_by_counts_whatever_the_clock_says():
    for config in (
        EnvironmentConfig(name="made.py:Up", max_turns=4, answer_steps=3),
        EnvironmentConfig(name="made.py:Up", max_turns=4, rounds=True),
    ):
        logs = []
        for seed in (0, 1, 2):
            logs.append(run(config, functools.partial(random.Random(seed).uniform, 0, 0.01))[1])
        assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("when", [{"answer_steps": 3}, {"rounds": True}, {}])
def test_more_episodes_than_processes_are_all_played_and_by_counts(when):
    config = dataclasses.replace(CONFIG, **when)
    first = num_at_once(config, NUM, FewProcesses.NUM)
    assert first == (FewProcesses.NUM if when else NUM)
    assert num_at_once(dataclasses.replace(config, name="", tools=("calculator",)), NUM, FewProcesses.NUM) == NUM
    free, _ = run(CONFIG)
    logs = []
    for seed in (0, 1):
        delay = functools.partial(random.Random(seed).uniform, 0, 0.01)
        episodes, log = run(config, delay, fails={2: "lost"}, fails_at="reset", host=FewProcesses, first=first)
        logs.append(log)
        for number, (episode, alone) in enumerate(zip(episodes, free, strict=True)):
            assert bool(episode.failure) == (number == 2)
            assert number == 2 or (episode.ids, episode.reward) == (alone.ids, alone.reward)
    assert logs[0] == logs[1] or not when


def test_as_soon_as_it_is_there_samples_the_same():
    slow, fast = run(CONFIG, functools.partial(random.Random(0).uniform, 0, 0.01))[0], run(CONFIG)[0]
    assert [episode.ids for episode in slow] == [episode.ids for episode in fast]


@pytest.mark.parametrize("max_tokens", range(1, 60, 7))
def test_nothing_is_longer_than_its_limit(max_tokens):
    episodes, _ = run(CONFIG, max_tokens=max_tokens)
    for episode in episodes:
        assert len(episode.ids) - episode.num_prompt_tokens <= max_tokens
        assert episode.pieces[-1].logprobs_T is not None  # no answer that nobody reads
        assert episode.reward is not None


def test_each_limit_ends_or_cuts_what_it_is_about():
    def limited(**limit):
        return run(dataclasses.replace(CONFIG, **limit))[0]

    free = limited()
    for short, whole in zip(limited(max_turn_tokens=6), free, strict=True):
        tokens = [turn["tokens"] for turn in short.turns]
        assert all(number <= 6 for number in tokens) and short.ids[: len(whole.ids)] == whole.ids[: len(short.ids)]
        assert short.ended_by == ("tokens" if whole.turns[len(tokens) - 1]["tokens"] > 6 else whole.ended_by)
    for two, whole in zip(limited(max_turns=2), free, strict=True):
        assert len(two.turns) == min(2, len(whole.turns))
        assert two.ended_by == ("turns" if len(whole.turns) > 2 else whole.ended_by)
    for late, whole in zip(limited(rollout_seconds=1e-9), free, strict=True):
        assert len(late.turns) == 1 and late.ended_by == ("done" if len(whole.turns) == 1 else "seconds")
        assert late.reward is not None and completion_of(late, 1.0, 0).truncated == (late.ended_by == "seconds")
    for cut in limited(max_answer_tokens=4):
        answers = [answer for turn in cut.turns for answer in turn["answers"]]
        assert cut.counts["cut_answers"] == sum("tokens left out ..]" in answer for answer in answers) == len(answers)
    assert not any(episode.counts["cut_answers"] for episode in free)


@pytest.mark.parametrize("max_answer_tokens", [1, 2, 3, 5, 6, 7, 8, 40])
def test_no_character_is_cut_in_two(max_answer_tokens):
    """Each of these is several tokens, and the text stays as it was."""
    host = MadeHost(lambda: 0.0)
    turns = Turns(tokenizer(), DataConfig(system_prompt=""), [tokenizer().eos_token_id], [], has_reply=True)
    text = "\U0001f600 é\u4e2d ,\U0001f600" * 9
    config = dataclasses.replace(CONFIG, max_answer_tokens=max_answer_tokens)
    player = Player(config, host, {"": turns}, tokenizer(), 100)
    host.ask = lambda episode, do, *_: host.waiting.append((0.0, {"episode": episode} | replies[do]))
    replies = {"reset": {"text": ""}, "finish": {"reward": 1.0, "info": {}}}
    replies["turn"] = {"answers": [text], "role": "", "counts": {}, "ended": False}
    loop = MadeLoop()
    player.begin([Episode(Prompt(0, [11, 12]), 0, 0, 3)], max_tokens=2000)
    play(config, loop, 1, loop.add, player, lambda decisions: decisions)
    (episode,) = player.finish()
    first, _, last = episode.turns[0]["answers"][0].split("\n")
    assert text.startswith(first) and text.endswith(last) and (first and last or max_answer_tokens == 1)


def test_an_environment_hears_what_thought_the_template_opened():
    template = templates.QWEN2.replace("assistant\n{%", "assistant\n<think>\n{%")
    data = DataConfig(system_prompt="", chat_template_kwargs={"chat_template": template})
    turns = Turns(tokenizer(), data, [tokenizer().eos_token_id], [], has_reply=True)
    host, loop = MadeHost(lambda: 0.0), MadeLoop()
    player = Player(CONFIG, host, {"": turns}, tokenizer(), 100)
    player.begin([Episode(Prompt(0, [11, 12]), 0, 0, 3)], max_tokens=200)
    play(CONFIG, loop, 1, loop.add, player, lambda decisions: decisions)
    assert host.opened_thoughts == {"<think>\n"}


def test_a_turn_notes_that_the_user_answered():
    """So that rewards do not take a reply for a tool's answer."""
    turns = Turns(tokenizer(), DataConfig(system_prompt=""), [tokenizer().eos_token_id], [], has_reply=True)
    for role in ("", "user"):
        loop = MadeLoop()
        player = Player(CONFIG, MadeHost(lambda: 0.0, role=role), {"": turns}, tokenizer(), 100)
        player.begin([Episode(Prompt(0, [11, 12]), 0, 0, 3)], max_tokens=200)
        play(CONFIG, loop, 1, loop.add, player, lambda decisions: decisions)
        (episode,) = player.finish()
        assert episode.turns and {turn.get("role", "") for turn in episode.turns} == {role}


def test_a_lost_episode_has_no_reward_and_a_hung_one_has_its_own():
    episodes, _ = run(CONFIG, fails={2: "lost", 5: "hung"})
    assert episodes[2].reward is None and "it died" in episodes[2].failure and "row" in episodes[2].failure
    assert episodes[5].reward == 0.0 and not episodes[5].failure and episodes[5].ended_by == "hung"
    excluded, _ = run(dataclasses.replace(CONFIG, hung_reward=None), fails={5: "hung"})
    assert excluded[5].reward is None and "it died" in excluded[5].failure
    others, _ = run(CONFIG)
    for number in {*range(NUM)} - {2, 5}:
        assert torch.equal(torch.tensor(episodes[number].ids), torch.tensor(others[number].ids))


def test_a_rows_seed_decides_wherever_the_row_comes():
    """CSV has numbers as text. Without a seed each prompt has its own."""
    columns = [{"seed": 7}, {"seed": "7"}, {"seed": "a maze"}, {"seed": 7.5}, {}, {"seed": None}]
    first, second = (
        [environment_seed(3, Prompt(index, [5], columns=row), held_out=False) for row in columns] for index in (0, 1)
    )
    assert first[:2] == second[:2] == [7, 7] and first[2:4] == second[2:4] and first[2] != first[3]
    assert first[4] == first[5] != second[4] == second[5]
    assert environment_seed(3, Prompt(0, [5], columns={"seed": "7"}), held_out=True) == 7 + 2**30


def test_an_episode_lost_before_its_first_turn_is_of_the_weights_that_were_there():
    episodes, _ = run(CONFIG, fails={2: "lost"}, fails_at="reset")
    assert episodes[2].ended_by == "lost" and not episodes[2].pieces
    for number, episode in enumerate(episodes):
        completion = completion_of(episode, 1.0, number)
        assert completion.version == completion.oldest_version == 3
        assert all(piece.version == 3 for piece in completion.pieces)
    sample = sample_of(episodes[2].prompt, completion_of(episodes[2], 1.0, 2))
    assert sample.ids_T.tolist() == episodes[2].prompt.ids and not sample.loss_mask_T.any()
