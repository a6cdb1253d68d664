"""Episodes on an engine that is made up: ids only grow, limits end them, and counts hide how fast a tool was."""

import dataclasses
import functools
import pickle
import random

import pytest

from configs.examples.toys import trained_tokenizer
from grpo.config import DataConfig, EnvironmentConfig
from grpo.data.batches import make_batch
from grpo.features.environments.episodes import environment_seed, rollout_of
from grpo.features.environments.play import Episode, Player, num_at_once, play
from grpo.features.environments.suffix import Turns
from grpo.types import Piece, Prompt
from tests.rollouts import over_the_wire
from tests.unit import chat_templates as templates

CONFIG = EnvironmentConfig(name="made.py:Up", max_turns=4)
NUM = 12


@functools.cache
def tokenizer():
    return trained_tokenizer(["some words to cut", "and others"], 300)


class MadeHost:
    """Environments in this process; a reply is there at the `delay()`-th poll after the call."""

    def __init__(self, delay=lambda: 1, fails=(), fails_at="turn", role="", answer=None):
        self.delay, self.fails, self.fails_at, self.role, self.answer = delay, fails, fails_at, role, answer
        self.waiting, self.opened_thoughts, self.cut, self.num_polls = [], set(), set(), 0

    def ask(self, episode, do, arguments, seconds):
        reply = {"text": f"Begin {episode}."}
        if do == "turn":
            text, _, thought, is_cut = arguments
            self.opened_thoughts.add(thought)
            self.cut |= {episode} if is_cut else set()
            reply = {"answers": [self.answer or f"<|im_start|>{len(text)}"], "role": self.role}
            reply |= {"counts": {"calls": 1}, "ended": is_cut or not self.answer and len(text) % 7 == 0}
        elif do == "finish":
            reply = {"reward": float(episode), "info": {}}
        if do == self.fails_at and episode in self.fails:
            reply = {"failed": "it died", "kind": self.fails[episode]}
        self.waiting.append((self.num_polls + self.delay(), reply | {"episode": episode}))

    def poll(self, seconds=0.0):
        self.num_polls += 1
        while not (there := [w for w in self.waiting if w[0] <= self.num_polls]) and seconds and self.waiting:
            self.num_polls += 1
        self.waiting = [w for w in self.waiting if w not in there]
        return [reply for _, reply in there]

    def drop(self, episode):
        pass


class FewProcesses(MadeHost):
    """An episode keeps one of five processes until it ends, and the others wait for one."""

    NUM = 5

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
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
    """Samples 2 to 9 tokens that follow from the ids before, and the stop token, or `tokens` at the limit."""

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
        ended = {}
        for number, (sampled, is_cut, done) in list(self.running.items()):
            self.running[number][2] = done + 1
            if done + 1 == len(sampled):
                del self.running[number]
                ended_by = "tokens" if is_cut else "stop"
                ended[number] = Piece.sampled(sampled, [-1.0] * len(sampled), 3, ended_by=ended_by)
        self.log.append(sorted(self.running))
        return ended


def turns_of(template=None) -> Turns:
    data = DataConfig(system_prompt="", chat_template_kwargs={"chat_template": template} if template else {})
    return Turns(tokenizer(), data, [tokenizer().eos_token_id], [], has_reply=True)


def run(config=CONFIG, host=None, max_tokens=200, first=None, num=NUM, turns=None):
    """Play episodes; returns them, what the engine was given, and the decisions that other ranks would hear."""
    player = Player(config, host or MadeHost(), {"": turns or turns_of()}, tokenizer(), 100)
    player.begin([Episode(Prompt(n, [11, 12]), 0, n, 3) for n in range(num)], max_tokens, num_first=first)
    loop, told = MadeLoop(), []

    def tell(decisions):
        told.append(pickle.loads(pickle.dumps(decisions)))
        return decisions

    play(config, loop, num, loop.add, player, tell, first)
    follower = MadeLoop()  # a rank that only hears
    heard = iter(told)
    play(config, follower, num, follower.add, None, lambda _: next(heard), first)
    assert follower.log == loop.log
    return player.finish(), loop.log


def test_ids_only_grow_and_only_what_was_sampled_counts():
    episodes, log = run()
    assert {episode.ended_by for episode in episodes} >= {"done", "turns"}
    for number, episode in enumerate(episodes):
        handed = [entry[1] for entry in log if isinstance(entry, tuple) and entry[0] == number]
        for before, after in zip(handed, handed[1:], strict=False):
            assert after[: len(before)] == before
        (rollout,) = over_the_wire([dataclasses.replace(rollout_of(episode), index=number)])
        batch = make_batch([rollout])
        assert tuple(batch.ids_N.tolist())[: len(handed[-1])] == handed[-1]  # trained on what the engine was given
        assert batch.ids_N.tolist() == episode.ids
        assert batch.loss_mask_N.sum() == rollout.num_tokens == sum(turn["tokens"] for turn in episode.turns)
        assert (batch.generator_logprobs_N[batch.loss_mask_N] == -1).all()
        opener = tokenizer().convert_tokens_to_ids("<|im_start|>")  # also in the text of each answer, where it is none
        assert (batch.ids_N[~batch.loss_mask_N] == opener).sum() == 2 * len(episode.turns)
        assert rollout.episode["reward"] == float(number) and rollout.version == 3
    batch = make_batch([rollout_of(episode) for episode in episodes])
    assert batch.versions_S.tolist() == [3] * NUM


@pytest.mark.parametrize("when", [{}, {"answer_steps": 3}, {"rounds": True}])
def test_an_answer_joins_by_counts_whatever_the_clock_says(when):
    """Also if there are more episodes than processes. Without counts too the tokens are the same."""
    config = dataclasses.replace(CONFIG, **when)
    first = num_at_once(config, NUM, FewProcesses.NUM)
    assert first == (FewProcesses.NUM if when else NUM)
    assert num_at_once(dataclasses.replace(config, name="", tools=("python",)), NUM, FewProcesses.NUM) == NUM
    free, _ = run()
    logs = []
    for seed in (0, 1):
        delay = functools.partial(random.Random(seed).randint, 1, 9)
        episodes, log = run(config, FewProcesses(delay, {2: "lost"}, "reset"), first=first)
        logs.append(log)
        for number, (episode, alone) in enumerate(zip(episodes, free, strict=True)):
            assert bool(episode.failure) == (number == 2)
            assert number == 2 or (episode.ids, episode.reward) == (alone.ids, alone.reward)
    assert logs[0] == logs[1] or not when


@pytest.mark.parametrize("max_tokens", [1, 8, 22, 57])
def test_nothing_is_longer_than_its_limit(max_tokens):
    episodes, _ = run(max_tokens=max_tokens)
    for episode in episodes:
        assert len(episode.ids) - episode.num_prompt_tokens <= max_tokens
        assert episode.pieces[-1].logprobs_T is not None  # no answer that nobody reads
        assert episode.reward is not None


def test_each_limit_ends_or_cuts_what_it_is_about():
    def limited(**limit):
        return run(dataclasses.replace(CONFIG, **limit))[0]

    free = limited()
    host = MadeHost()
    for short, whole in zip(run(dataclasses.replace(CONFIG, max_turn_tokens=6), host)[0], free, strict=True):
        tokens = [turn["tokens"] for turn in short.turns]
        assert all(number <= 6 for number in tokens) and short.ids[: len(whole.ids)] == whole.ids[: len(short.ids)]
        assert short.ended_by == ("tokens" if whole.turns[len(tokens) - 1]["tokens"] > 6 else whole.ended_by)
        # its calls are carried out, and their answers noted, although nobody reads them
        assert (short.number in host.cut) == (short.ended_by == "tokens") and short.turns[-1]["answers"]
    for two, whole in zip(limited(max_turns=2), free, strict=True):
        assert len(two.turns) == min(2, len(whole.turns))
        assert two.ended_by == ("turns" if len(whole.turns) > 2 else whole.ended_by)
    for late, whole in zip(limited(rollout_seconds=1e-9), free, strict=True):
        assert len(late.turns) == 1 and late.ended_by == ("done" if len(whole.turns) == 1 else "seconds")
        assert late.reward is not None and rollout_of(late).truncated == (late.ended_by == "seconds")
    for cut in limited(max_answer_tokens=4):
        answers = [answer for turn in cut.turns for answer in turn["answers"]]
        assert cut.counts["cut_answers"] == sum("tokens left out ..]" in answer for answer in answers) == len(answers)
    assert not any(episode.counts["cut_answers"] for episode in free)


@pytest.mark.parametrize("max_answer_tokens", [1, 2, 5, 7, 40])
def test_no_character_is_cut_in_two(max_answer_tokens):
    """Each of these is several tokens, and the text stays as it was."""
    text = "\U0001f600 é\u4e2d ,\U0001f600" * 9
    config = dataclasses.replace(CONFIG, max_answer_tokens=max_answer_tokens)
    (episode,), _ = run(config, MadeHost(answer=text), max_tokens=2000, num=1)
    first, _, last = episode.turns[0]["answers"][0].split("\n")
    assert text.startswith(first) and text.endswith(last) and (first and last or max_answer_tokens == 1)


@pytest.mark.parametrize("role", ["", "user"])
def test_an_environment_hears_what_thought_the_template_opened_and_a_turn_notes_who_answered(role):
    """So that rewards do not take a reply for a tool's answer."""
    host = MadeHost(role=role)
    turns = turns_of(templates.QWEN2.replace("assistant\n{%", "assistant\n<think>\n{%"))
    (episode,), _ = run(host=host, num=1, turns=turns)
    assert host.opened_thoughts == {"<think>\n"}
    assert {turn.get("role", "") for turn in episode.turns} == {role}


def test_a_lost_episode_has_no_reward_and_a_hung_one_has_its_own():
    episodes, _ = run(host=MadeHost(fails={2: "lost", 5: "hung"}))
    assert episodes[2].reward is None and "it died" in episodes[2].failure and "row" in episodes[2].failure
    assert episodes[5].reward == 0.0 and not episodes[5].failure and episodes[5].ended_by == "hung"
    assert episodes[5].turns[-1]["failed"] == "it died"
    excluded, _ = run(dataclasses.replace(CONFIG, hung_reward=None), MadeHost(fails={5: "hung"}))
    assert excluded[5].reward is None and "it died" in excluded[5].failure
    others, _ = run()
    for number in {*range(NUM)} - {2, 5}:
        assert episodes[number].ids == others[number].ids


def test_an_episode_lost_before_its_first_turn_is_of_the_weights_that_were_there():
    episodes, _ = run(host=MadeHost(fails={2: "lost"}, fails_at="reset"))
    (rollout,) = over_the_wire([dataclasses.replace(rollout_of(episodes[2]), index=2)])
    assert rollout.version == rollout.oldest_version == 3 and not rollout.num_tokens
    batch = make_batch([rollout])
    assert batch.ids_N.tolist() == episodes[2].prompt.ids and not batch.loss_mask_N.any()
    assert batch.prompt_lengths_S.tolist() == [len(episodes[2].prompt.ids)]


def test_a_rows_seed_decides_wherever_the_row_comes():
    """CSV has numbers as text. Without a seed each prompt has its own."""
    columns = [{"seed": 7}, {"seed": "7"}, {"seed": "a maze"}, {"seed": None}]
    first, second = (
        [environment_seed(3, Prompt(n, [5], columns=row), held_out=False) for row in columns] for n in (0, 1)
    )
    assert first[:2] == second[:2] == [7, 7] and first[2] == second[2] and first[3] != second[3]
    assert environment_seed(3, Prompt(0, [5], columns={"seed": "7"}), held_out=True) == 7 + 2**30
