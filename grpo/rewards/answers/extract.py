"""Where the final answer stands in a completion: behind the thoughts, in a tag, a box or behind ####.

One pass each, whatever a policy writes: a text that repeats "\\boxed{" or "<answer>" takes no quadratic time.
"""

import re

from grpo.rewards.answers.numbers import clean_text, read_number

# Tags in any case, with blanks and attributes: an answer is not shown to a reader because its <Think > is odd.
_THINK_TAG = re.compile(r"<\s*(?P<close>/\s*)?think\b[^<>]*>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<\s*(?P<close>/\s*)?answer\s*>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# Between two answers that leave it to the reader which one is meant.
_JOINED = re.compile(r"[\s,;$.*]*+(?:and|or|or maybe|or perhaps|/)?[\s,;$.*]*+", re.IGNORECASE)

Span = tuple[int, int, str]  # start, end, content


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer in a completion, without surrounding blanks and boxes; None if there is none or it is empty.

    Thoughts are no answer (see `without_thoughts`). answer_tag: content of the last complete <answer>..</answer>.
    boxed: content of the last \\boxed{} that is not empty and whose braces balance. hashes: what follows the last ####
    on its line. Where the completion has an <answer>, box and hashes are looked for only in it. None also for a choice,
    which is no answer: two different ones with nothing but "and", "or" or a comma between, or different boxes in a tag.

    Raises ValueError on another format.
    """
    if answer_format not in ("answer_tag", "boxed", "hashes"):
        raise ValueError(f"answer_format={answer_format!r} is unknown; use answer_tag, boxed or hashes")
    text = without_thoughts(text)
    tagged = tagged_answer(text)
    if answer_format == "answer_tag":
        answer = _unboxed(tagged or "")
    elif answer_format == "boxed" and tagged is None:
        answer = _unbox_inner(_last(text, boxes(text)))
    elif answer_format == "boxed":
        answer = _unboxed(tagged) if boxes(tagged) else ""
    else:
        _, hashes, rest = (text if tagged is None else tagged).rpartition("####")
        answer = rest.partition("\n")[0] if hashes else ""
    return answer.strip() or None


# Bounded, so that "\(" without an end costs the same wherever it stands.
_FORMULA = re.compile(
    r"\$\$[^$]{1,300}\$\$|(?<![\\\d])\$[^$\n]{1,300}(?<!\\)\$|\\\(.{1,300}?\\\)|\\\[.{1,300}?\\\]", re.DOTALL
)
# A formula is stated at the begin of a sentence or behind such a word, and ends its sentence: not in "not $5$".
_STATES = re.compile(r"(?:[\n.:]|(?<![!<>])=|\b(?:is|are|so|get|gives|equals))\Z")
_END_OF_SENTENCE = re.compile(r"[ *]*(?:[.!]|\n|\Z)")
# A number is stated as all that follows such a word at the end of the text.
_STATED_NUMBER = re.compile(
    r"(?:.*(?:\n|:|(?<![!<>])=|\b(?:is|are|get|gives|equals)\b)|\A)([^\n:=]{1,60})\Z", re.DOTALL
)


def find_answer(text: str) -> str | None:
    """The final answer wherever it is stated: in a tag, in boxes, as the last formula, as the number at the end.

    Looser than extract_answer. None if there is nothing of these, or if the last formula is not what a sentence states.
    """
    text = without_thoughts(text)
    if (tagged := tagged_answer(text)) is not None:
        return _unboxed(tagged).strip() or None
    if found := boxes(text):
        return _unbox_inner(_last(text, found)).strip() or None
    if formulas := list(_FORMULA.finditer(text)):
        last = formulas[-1]
        before = text[: last.start()].rstrip(" *")
        stated = (not before or _STATES.search(before[-10:])) and _END_OF_SENTENCE.match(text, last.end())
        return last[0].strip("$") if stated else None
    stated = _STATED_NUMBER.match(text.rstrip(" \n*.")[-100:])
    return stated[1].strip() if stated and read_number(clean_text(stated[1])) else None


def without_thoughts(text: str) -> str:
    """The text without its thoughts: what stands between the first <think> and the last </think>.

    A block that never ends hides all that follows; a closing tag without an opening one before it (chat templates open
    <think> in the prompt) hides all that stands before it.
    """
    tags = list(_THINK_TAG.finditer(text)) if "<" in text else []
    closing = [number for number, tag in enumerate(tags) if tag["close"]]
    shown, start = "", 0
    if closing:
        shown = "" if tags[0]["close"] else text[: tags[0].start()]
        start, tags = tags[closing[-1]].end(), tags[closing[-1] + 1 :]
    return shown + (text[start : tags[0].start()] if tags else text[start:])


def tagged_answer(text: str) -> str | None:
    """The content of the last complete <answer>..</answer>, "" if it is one of a choice; None without one.

    Of "<answer> 1 <answer> 2 </answer>" the answer is 2.
    """
    found, opened = [], None
    for tag in _ANSWER_TAG.finditer(text) if "<" in text else ():
        if not tag["close"]:
            opened = tag
        elif opened:
            found.append((opened.start(), tag.end(), text[opened.end() : tag.start()]))
            opened = None
    return _last(text, found) if found else None


def boxes(text: str) -> list[Span]:
    """The outermost \\boxed{..} and \\fbox{..} that close and are not empty, in order."""
    if "box" not in text:
        return []
    found: list[Span] = []
    opened: list[tuple[bool, int, int]] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match[0]
        if token.endswith("{") and token != "\\{":
            opened.append((token != "{", match.start(), match.end()))
        elif token == "}" and opened:
            is_box, start, inside = opened.pop()
            content = text[inside : match.start()]
            if is_box and content.strip():
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, match.end(), content))
    return found


def _last(text: str, found: list[Span]) -> str:
    """The last of several answers; "" if the one before is another and only joined to it."""
    if len(found) > 1:
        (_, end, before), (start, _, last) = found[-2:]
        if before.strip() not in ("", last.strip()) and _JOINED.fullmatch(text, end, start):
            return ""
    return found[-1][2] if found else ""


def _unboxed(text: str) -> str:
    """An answer's text with its box taken off: one box in some words is the answer, different boxes are none."""
    found = boxes(text)
    if not found:
        return _EMPTY_BOX.sub("", text)
    return _unbox_inner(found[-1][2]) if len({content.strip() for _, _, content in found}) == 1 else ""


def _unbox_inner(content: str) -> str:
    """Content of a box without boxes that stand inside it."""
    content = _BOX_COMMAND.sub("", _EMPTY_BOX.sub("", content)).strip()
    return content[1:-1] if content[:1] == "{" and content[-1:] == "}" else content
