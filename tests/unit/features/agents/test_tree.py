"""Turns of agents as a tree: what follows an answer is what the template writes, each token is trained once."""

import queue
import random
from dataclasses import replace

import pytest
import torch

from grpo.config import EnvironmentConfig, GeneratorConfig
from grpo.features.agents.tree import Refusal, Session, Turn
from grpo.features.agents.writer import Writer
from grpo.types import Piece, Prompt
from tests.unit import chat_templates as templates
from tests.unit.features.environments.test_turns_suffix import CARRIED, PIECES, SCHEMAS, turns_for


def session_for(turns, **fields) -> Session:
    writer = Writer(turns.tokenizer, turns.data, turns.stop_token_ids, "hermes")
    environment = EnvironmentConfig(agent="made.py:run", **{"max_turns": 100, **fields})
    return Session(Prompt(0, []), 0, 0, writer, environment, GeneratorConfig(), 5000, queue.SimpleQueue())


def answer(session: Session, body: dict, *ids: int, is_retry: bool = False) -> tuple[Turn, dict]:
    """Ask, and let the engine say these ids. Returns the turn and the message that the agent gets."""
    turn = session.ask(body, is_retry)
    if not turn.sampled.done():
        session.settle(turn, Piece.sampled(ids, [-1.0] * len(ids), ended_by="stop"))
    session.finish(turn)
    turn.was_delivered = True
    return turn, dict(turn.message)


def written(turn: Turn) -> list[int]:
    """Return the ids that were written for a turn."""
    return turn.before[-1].ids_T.tolist()


def earlier(turn: Turn) -> list:
    """Return what was sampled before a turn."""
    return [piece for piece in turn.before if piece.is_sampled]


@pytest.mark.parametrize(("name", "role", "arguments"), CARRIED)
def test_what_follows_an_answer_is_what_the_template_writes(name, role, arguments):
    """Against suffix.py, which finds it another way, with texts that a template or tokenizer could take for its own."""
    turns = turns_for(getattr(templates, name), role, arguments)
    draw = random.Random(0)
    end = turns._encode(turns.frames[role][0])[0]
    session = session_for(turns, max_turns=1000)

    def text() -> str:
        return "".join(draw.choices([*PIECES, "look", " 42"], k=draw.randint(0, 6)))

    for number in range(60):
        question = f"Where {number}?"
        messages = [{"role": "user", "content": question}]
        turn, message = answer(session, {"messages": messages, "tools": SCHEMAS}, 70, end)
        assert turn.prompt_ids == turns.opening(question)
        ids = turn.prompt_ids
        for _ in range(3):
            ids = ids + turn.piece.ids_T.tolist()
            answers = [text() for _ in range(draw.randint(1, 3) if role == "tool" else 1)]
            messages = [*messages, message, *({"role": role, "content": one} for one in answers)]
            sampled = [*draw.choices(range(60, 300), k=draw.randint(0, 6)), end]
            turn, message = answer(session, {"messages": messages, "tools": SCHEMAS}, *sampled)
            assert written(turn) == turns.ids(answers, role)
            ids = ids + written(turn)
            assert turn.prompt_ids == ids


@pytest.fixture
def session():
    return session_for(turns_for(templates.QWEN3, "user", {}))


def test_branches_edits_and_retries_train_each_token_once(session):
    end = min(session.writer.stop_ids)
    hi = {"role": "user", "content": "hi"}
    first, said = answer(session, {"messages": [hi]}, 70, 71, end)
    history = [hi, {"role": "assistant", "content": f"  {said['content']}\n"}]  # a client that adds blanks
    left, _ = answer(session, {"messages": [*history, {"role": "user", "content": "left"}]}, 72, end)
    right = {"messages": [*history, {"role": "user", "content": [{"type": "text", "text": "right"}]}]}
    branch, _ = answer(session, right, 73, end)
    again, _ = answer(session, right, is_retry=True)
    assert again is branch and earlier(left) == earlier(branch) == [first.piece]
    other, _ = answer(session, right, 74, end)  # the same request on purpose is a new sample
    edited, _ = answer(session, {"messages": [*history[:1], {"role": "assistant", "content": "no"}, hi]}, 75, end)
    assert other is not branch and earlier(other) == [first.piece] and earlier(edited) == []

    sequences = [*session.sequences()]
    assert len(sequences) == 4
    trained = [piece.ids_T[piece.loss_mask_T].tolist() for pieces in sequences for piece in pieces if piece.is_sampled]
    assert [ids for ids in trained if ids] == [[70, 71, end], [72, end], [73, end], [74, end], [75, end]]
    for pieces, turn in zip(sequences, (left, branch, other, edited), strict=True):
        assert torch.cat([piece.ids_T for piece in pieces]).tolist() == turn.prompt_ids + turn.piece.ids_T.tolist()


def test_a_turn_that_was_not_delivered_is_not_trained(session):
    turn = session.ask({"messages": [{"role": "user", "content": "hi"}]}, False)
    session.settle(turn, Piece.sampled([70], [-1.0]))
    assert not [*session.sequences()]


def test_a_stop_text_ends_a_turn_and_what_the_model_wrote_behind_it_is_dropped(session):
    tokenizer, end = session.writer.tokenizer, min(session.writer.stop_ids)
    ids = tokenizer("look at some words", add_special_tokens=False)["input_ids"]
    hi = {"role": "user", "content": "hi"}
    turn, said = answer(session, {"messages": [hi], "stop": ["some", "zebra"]}, *ids, end)
    assert said["content"] == "look at " and "words" not in tokenizer.decode(turn.piece.ids_T)
    further, _ = answer(session, {"messages": [hi, said, hi]}, 70, end)
    assert earlier(further) == [turn.piece] and written(further)[0] in session.writer.stop_ids  # the template's


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"n": 2}, "n=2"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"temperature": 0.2}, "temperature=0.2"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"max_tokens": 0}, "max_tokens=0"),  # with which vLLM would end the run
    ],
)
def test_what_would_sample_from_another_distribution_is_refused_by_name(session, body, name):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(Refusal, match=name):
        session.ask({"messages": messages} | body, False)
    plain = {"n": 1, "temperature": 1, "top_p": None, "logit_bias": {}, "top_k": -1}
    lengths = {"max_completion_tokens": None, "max_tokens": 7}
    assert session.ask({"messages": messages} | plain | lengths, False).max_tokens == 7


def test_limits_say_themselves_before_the_agent_is_killed(session):
    long = {"messages": [{"role": "user", "content": "日本 " * 5000}]}
    with pytest.raises(Refusal, match="maximum context length is 5000") as refused:
        session.ask(long, False)
    assert refused.value.code == "context_length_exceeded" and session.limit == "tokens"
    session.environment = replace(session.environment, max_turns=1)
    answer(session, {"messages": [{"role": "user", "content": "hi"}]}, 70)
    with pytest.raises(Refusal, match="limit of turns") as refused:
        session.ask({"messages": [{"role": "user", "content": "ho"}]}, False)
    assert session.limit == "turns" and refused.value.status == 403  # clients ask again after a 429
