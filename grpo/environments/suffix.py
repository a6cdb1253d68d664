"""What stands between two turns of the model, as token ids: the chat template writes it once, around marks.

A mark in place of the model's text, and another in place of an answer, show what the template writes behind a turn: its
end, the answer, the opening of the next turn. Ids only grow by it, `ids + sampled + suffix`: nothing sampled is decoded
and encoded again, and no part of an answer becomes a special token. Six rules say whether a template can carry that.

Left out: templates that need a call as data, with an id or a tool's name, beside the model's text.
"""

import os.path
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from grpo.config import DataConfig
from grpo.data.chat import Refused, prompt_messages, render, template_name
from grpo.data.rows import Message, as_messages
from grpo.text import without_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stand for texts: no template writes such words.
QUESTION, TEXT, EARLIER, ANSWER, OTHER = "MARKquestion", "MARKtext", "MARKearlier", "MARKanswer", "MARKother"
# What a template that trims, quotes or escapes answers changes.
ODD = ' "a"\\b\n<c>&é{d} \n'
# The thought that a template writes itself, at the end of an opening: empty, or to be filled in, or none.
OPENED_THOUGHT = re.compile(r"(?:<think>\s*(?:</think>\s*)?)?\Z")
# Characters shown of a text in a refusal, before and behind the place from which on it is another one.
SHOWN_BEFORE, SHOWN_BEHIND = 20, 40


class Turns:
    """Makes token ids of what an environment says, as the chat template of a run writes it."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        data: DataConfig,
        stop_token_ids: Collection[int],
        schemas: list[dict[str, Any]],
        reply_as: str = "tool",
        has_reply: bool = False,
    ):
        """Try the template's rules. Raises ValueError, with both texts and the way out, if it breaks one.

        stop_token_ids: tokens at which a turn ends. schemas: of the tools, for the template. reply_as: the role that
        answers calls. has_reply: turns without calls are answered as well, by the user.
        """
        self.tokenizer, self.data, self.schemas, self.stop_token_ids = tokenizer, data, schemas, {*stop_token_ids}
        self.start = prompt_messages(data, QUESTION)
        roles = ([reply_as] if schemas else []) + (["user"] if has_reply or not schemas else [])
        self.role, self.frames = roles[0], {}
        for role in dict.fromkeys(roles):
            try:
                self.frames[role] = self._frame(role)
            except Refused as error:
                hint = "--environment.reply-as user, or with " if role == "tool" else ""
                raise ValueError(
                    f"{template_name(tokenizer, data)} cannot carry several turns with answers of role {role}: {error}"
                    f"; try it with {hint}another template (--data.prompt-template FILE.jinja)"
                ) from error
        scaffolds = [self._write(self.start), *(text for frame in self.frames.values() for text in frame)]
        self.special_ids = self._special_ids("".join(scaffolds))
        # with what each turn begins, though the template and not the model wrote it
        self.opened_thought = OPENED_THOUGHT.search(self._write(self.start))[0]
        self.rewrites = {role: ODD not in self._behind(role, [ODD]) for role in self.frames}

    @property
    def line(self) -> str:
        """What a user should know about the template, empty if there is nothing."""
        prompt = self._write(self.start)
        if all(schema["function"]["name"] in prompt for schema in self.schemas):
            return ""
        return "the chat template does not show the tools; describe them in data.system_prompt"

    def opening(self, prompt: str | list[Message]) -> list[int]:
        """A first prompt: the system prompt, the tools, the user's message or messages, the opening of the answer."""
        *earlier, last = as_messages(prompt)
        text = last["content"]
        marked, written = (
            self._write(prompt_messages(self.data, [*earlier, last | {"content": content}]))
            for content in (QUESTION, text)
        )
        before, _, behind = marked.partition(QUESTION)
        return self._encode(before) + self._plain_ids(_cut(written, before, behind, text)) + self._encode(behind)

    def ids(self, answers: list[str], last: int, role: str = "") -> list[int]:
        """What follows a turn whose last token is `last`: the rest of its end, the answers, the next opening.

        role: who answers, if not `reply_as`: user, for a turn without calls. Several answers of the user are one
        message. Raises ValueError if `last` ends no turn.
        """
        if last not in self.stop_token_ids:
            raise ValueError(f"a turn ended with token {last}, which is none of {sorted(self.stop_token_ids)}")
        role = role or self.role
        answers = ["\n\n".join(answers)] if role == "user" else answers
        before, between, behind = self.frames[role]
        ids = self._encode(before)[1:]  # the model sampled the token that ends it, this one or another
        for number, answer in enumerate(answers):
            if number:
                ids += self._encode(between)
            if self.rewrites[role]:
                answer = _cut(self._behind(role, [answer]), before, behind, answer)
            ids += self._plain_ids(answer)
        return ids + self._encode(behind)

    def _frame(self, role: str) -> tuple[str, str, str]:
        """The texts before, between and behind answers. Raises Refused if a rule does not hold."""
        suffix, between = self._behind(role, [ANSWER]), ""
        before, answer, behind = suffix.partition(ANSWER)
        _must(answer == ANSWER, "an answer is not written", ANSWER, suffix)
        if role != "user":
            between = self._behind(role, [ANSWER, OTHER]).removeprefix(before + ANSWER).partition(OTHER)[0]
            three = before + between.join([ANSWER, OTHER, ANSWER]) + behind
            found = self._behind(role, [ANSWER, OTHER, ANSWER])
            _must(found == three, "a row of three answers is written otherwise", three, found)
        for name, other in (("in the second round", role), ("in a longer chat", "user")):
            found = self._behind(role, [ANSWER], self._chat(self.start, EARLIER, other, [ANSWER]))
            _must(found == suffix, f"what follows a turn {name} is written otherwise", suffix, found)
        first = self._encode(before)[:1]
        name = f"{self.tokenizer.convert_ids_to_tokens(first)[0]!r} ({first[0]})" if first else "nothing"
        what = f"what follows a turn begins with {name}, at which the model does not stop (generator.stop_token_ids)"
        _must(self.stop_token_ids.issuperset(first or [None]), what)
        opened, closed = self._write(self.start), self._write(self.start, opening=False)
        closed = os.path.commonprefix([closed, opened])  # some write a token at the end of closed chats
        opening = opened.removeprefix(closed) or opened.partition(QUESTION)[2]  # the end of a question opens, in some
        _must(behind.endswith(opening), "a turn is not opened as the first one is", opening, behind)
        whole = self._write(self._chat(self.start, TEXT, role, [ANSWER]))
        start = whole[: len(closed)]
        _must(start == closed, "the prompt, once a turn follows, is written otherwise", closed, start)
        asked, found = OPENED_THOUGHT.sub("", opened), OPENED_THOUGHT.sub("", whole.partition(TEXT)[0])
        _must(found == asked, "what stands before a turn is written otherwise", asked, found)
        return before, between, behind

    def _chat(self, history: list[Message], text: str, role: str, answers: list[str]) -> list[Message]:
        answered = [{"role": role, "content": answer} for answer in answers]
        return [*history, {"role": "assistant", "content": text}, *answered]

    def _write(self, messages: list[Message], opening: bool = True) -> str:
        return render(self.tokenizer, self.data, messages, opening, self.schemas or None)[0]

    def _behind(self, role: str, answers: list[str], history: list[Message] | None = None) -> str:
        """What stands behind a turn of the model that is answered so."""
        return self._write(self._chat(history or self.start, TEXT, role, answers)).partition(TEXT)[2]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _special_ids(self, scaffold: str) -> set[int]:
        """Special tokens, and other added ones with which the template sets answers apart; not the unknown one."""
        own, written = self.tokenizer, {*self._encode(scaffold)}
        added = {token for token, entry in own.added_tokens_decoder.items() if entry.special or token in written}
        unknown = {own.unk_token_id} - {own.eos_token_id, own.bos_token_id, own.pad_token_id}
        return (added | {*own.all_special_ids}) - unknown

    def _plain_ids(self, text: str) -> list[int]:
        """Ids of a text of which nothing may become a special token; pieces of it, where it otherwise would."""
        text = without_surrogates(text)
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if not self.special_ids.intersection(ids) or len(text) < 2:
            return [token for token in ids if token not in self.special_ids]
        half = len(text) // 2
        return self._plain_ids(text[:half]) + self._plain_ids(text[half:])


def _must(holds: bool, what: str, expected: str = "", found: str = "") -> None:
    """Raise Refused for a rule that does not hold, and show where two texts part."""
    if holds:
        return
    if expected or found:
        at = max(0, len(os.path.commonprefix([expected, found])) - SHOWN_BEFORE)
        texts = [text[at : at + SHOWN_BEFORE + SHOWN_BEHIND] for text in (expected, found)]
        what += f": {texts[0]!r} is expected, {texts[1]!r} is there"
    raise Refused(what)


def _cut(written: str, before: str, behind: str, text: str) -> str:
    """`text` as the template writes it between `before` and `behind`, trimmed or quoted; as it is, if not found so."""
    found = written.startswith(before) and written.endswith(behind) and len(written) >= len(before + behind)
    return written[len(before) : len(written) - len(behind)] if found else text
