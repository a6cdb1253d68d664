"""The text between two turns of the model, as token ids. The chat template writes it once, around marks.

One mark takes the place of the model's text and another that of an answer. Around them the template shows what it
writes after a turn: its end, the answer, the opening of the next turn. So ids only grow, `ids + sampled + suffix`:
nothing that was sampled is decoded and encoded again, and no part of an answer becomes a special token. Six rules check
that a template allows this.

Left out: templates that need a call as data, with an id or a tool's name, next to the model's text.
"""

import os.path
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from grpo.config import DataConfig
from grpo.data.chat import Refused, as_written, plain_ids, prompt_messages, render, special_ids, template_name
from grpo.data.rows import Messages, Tools, as_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Marks in place of texts. No template writes such words itself.
QUESTION = "MARKquestion"
TEXT = "MARKtext"
EARLIER = "MARKearlier"
ANSWER = "MARKanswer"
OTHER = "MARKother"
# A text that a template changes if it trims, quotes or escapes answers
ODD = ' "a"\\b\n<c>&é{d} \n'
# The thought that a template writes itself at the end of an opening: none, an empty one, or one to be continued
OPENED_THOUGHT = re.compile(r"(?:<think>\s*(?:</think>\s*)?)?\Z")
# Characters shown in a refusal before and after the place where two texts begin to differ
SHOWN_BEFORE = 20
SHOWN_AFTER = 40


class Turns:
    """Turns what an environment says into token ids, in the words of the run's chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        data: DataConfig,
        stop_token_ids: Collection[int],
        schemas: Tools,
        reply_as: str = "tool",
        has_reply: bool = False,
    ):
        """Check the template. Raises ValueError, with both texts and the way out, if it breaks a rule.

        stop_token_ids: tokens at which a turn ends. schemas: of the tools, for the template. reply_as: the role that
        answers calls. has_reply: the user answers turns without calls.
        """
        self.tokenizer = tokenizer
        self.data = data
        self.schemas = schemas
        self.stop_token_ids = set(stop_token_ids)
        self.start = prompt_messages(data, QUESTION)

        roles = [reply_as] if schemas else []
        if has_reply or not schemas:
            roles.append("user")
        self.role = roles[0]
        self.frames: dict[str, tuple[str, str, str]] = {}
        for role in dict.fromkeys(roles):
            try:
                self.frames[role] = self._frame(role)
            except Refused as error:
                hint = "--environment.reply-as user, or with " if role == "tool" else ""
                raise ValueError(
                    f"{template_name(tokenizer, data)} cannot carry several turns with answers of role {role}: {error}"
                    f"; try it with {hint}another template (--data.prompt-template FILE.jinja)"
                ) from error

        opened = self._write(self.start)
        self.special_ids = special_ids(tokenizer)
        # a turn begins with this thought, although the template and not the model wrote it
        self.opened_thought = OPENED_THOUGHT.search(opened)[0]
        self.rewrites = {role: ODD not in self._after_turn(role, [ODD]) for role in self.frames}

    def opening(self, prompt: str | Messages) -> list[int]:
        """Return the ids of a first prompt: system prompt, tools, the user's messages, the opening of the answer."""
        *earlier, last = as_messages(prompt)
        marked = last | {"content": QUESTION}
        marked_chat = prompt_messages(self.data, [*earlier, marked])
        before, _, after = self._write(marked_chat).partition(QUESTION)
        written = self._write(prompt_messages(self.data, prompt))
        question = as_written(written, before, after, last["content"])
        ids = self._encode(before)
        ids += plain_ids(self.tokenizer, question, self.special_ids)
        ids += self._encode(after)
        return ids

    def ids(self, answers: list[str], role: str = "") -> list[int]:
        """Return the ids after a turn that has ended: the rest of its end, answers, the opening of the next turn.

        role: who answers: empty for `reply_as`, `user` after a turn without calls. Several answers of the user become
        one message.
        """
        role = role or self.role
        if role == "user":
            answers = ["\n\n".join(answers)]
        before, between, after = self.frames[role]
        ids = self._encode(before)[1:]  # the model sampled the token that ends the turn, this one or another
        for number, answer in enumerate(answers):
            if number > 0:
                ids += self._encode(between)
            if self.rewrites[role]:
                suffix = self._after_turn(role, [answer])
                answer = as_written(suffix, before, after, answer)
            ids += plain_ids(self.tokenizer, answer, self.special_ids)
        return ids + self._encode(after)

    def _frame(self, role: str) -> tuple[str, str, str]:
        """Find the texts before, between and after answers. Raises Refused if the template breaks a rule."""
        suffix = self._after_turn(role, [ANSWER])
        before, answer, after = suffix.partition(ANSWER)
        if not answer:
            _refuse("an answer is not written", ANSWER, suffix)
        between = ""
        if role != "user":
            two = self._after_turn(role, [ANSWER, OTHER])
            behind_first = two.removeprefix(before + ANSWER)
            between, _, _ = behind_first.partition(OTHER)
            three = [ANSWER, OTHER, ANSWER]
            expected = before + between.join(three) + after
            _check("a row of three answers is written otherwise", expected, self._after_turn(role, three))
        earlier_roles = {"in the second round": role, "in a longer chat": "user"}
        for where, earlier_role in earlier_roles.items():
            history = self._chat(self.start, EARLIER, earlier_role, [ANSWER])
            written = self._after_turn(role, [ANSWER], history)
            _check(f"what follows a turn {where} is written otherwise", suffix, written)

        first = self._encode(before)[:1]
        if not self.stop_token_ids.intersection(first):
            name = self.tokenizer.convert_ids_to_tokens(first)
            raise Refused(
                f"what follows a turn begins with {name} (ids {first}), at which the model does not stop "
                "(generator.stop_token_ids)"
            )

        opened = self._write(self.start)
        closed = self._write(self.start, opening=False)
        closed = os.path.commonprefix([closed, opened])  # some templates write a token at the end of closed chats
        opening = opened.removeprefix(closed) or opened.partition(QUESTION)[2]  # or the end of a question opens a turn
        if not after.endswith(opening):
            _refuse("a turn is not opened as the first one is", opening, after)
        chat = self._chat(self.start, TEXT, role, [ANSWER])
        whole = self._write(chat)
        if not whole.startswith(closed):
            _refuse("the prompt, once a turn follows, is written otherwise", closed, whole)
        before_turn, _, _ = whole.partition(TEXT)
        _check(
            "what stands before a turn is written otherwise",
            OPENED_THOUGHT.sub("", opened),
            OPENED_THOUGHT.sub("", before_turn),
        )
        return before, between, after

    def _chat(
        self,
        history: Messages,
        text: str,
        role: str,
        answers: list[str],
    ) -> Messages:
        """Return messages with a turn of the model and its answers behind them."""
        turn = {"role": "assistant", "content": text}
        answered = [{"role": role, "content": answer} for answer in answers]
        return [*history, turn, *answered]

    def _write(self, messages: Messages, opening: bool = True) -> str:
        text, _ = render(self.tokenizer, self.data, messages, opening, self.schemas or None)
        return text

    def _after_turn(
        self,
        role: str,
        answers: list[str],
        history: Messages | None = None,
    ) -> str:
        """Return what the template writes after a turn that gets these answers."""
        chat = self._chat(history or self.start, TEXT, role, answers)
        _, _, suffix = self._write(chat).partition(TEXT)
        return suffix

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _check(what: str, expected: str, actual: str) -> None:
    """Raise Refused if the two texts differ."""
    if actual != expected:
        _refuse(what, expected, actual)


def _refuse(what: str, expected: str, actual: str) -> None:
    """Raise Refused and show where the two texts begin to differ."""
    num_equal = len(os.path.commonprefix([expected, actual]))
    start = max(0, num_equal - SHOWN_BEFORE)
    end = start + SHOWN_BEFORE + SHOWN_AFTER
    raise Refused(f"{what}: {expected[start:end]!r} is expected, {actual[start:end]!r} is there")
