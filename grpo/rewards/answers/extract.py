"""Where the final answer stands in a completion: behind the thoughts, in a tag, a box or behind ####.

One pass each, whatever a policy writes: a text that repeats "\\boxed{" or "<answer>" takes no quadratic time.
"""

import re

# Tags in any case, with blanks and attributes: an answer is not shown to a reader because its <Think > is odd.
_THINK_TAG = re.compile(r"<\s*(?P<close>/\s*)?think\b[^<>]*>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<\s*(?P<close>/\s*)?answer\s*>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Between two answers that a reader takes as one ("1 and 2"), and between those that leave it to him.
_ALSO = re.compile(r"[\s,;$.*]*(?:and|,|;)?[\s,;$.*]*")
_OR = re.compile(r"[\s,;$.*]*(?:/|or|or maybe|or perhaps)[\s,;$.*]*", re.IGNORECASE)


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer in a completion, without surrounding blanks and boxes; None if there is none or it is empty.

    Thoughts are no answer (see `without_thoughts`). answer_tag: content of the last complete <answer>..</answer>.
    boxed: content of the last \\boxed{} that is not empty and whose braces balance; boxes in a row, with nothing but
    "and" or commas between them, are one list. hashes: what follows the last #### on its line. Where the completion has
    an <answer>, box and hashes are looked for only in it. None also for a choice, which is no answer: tags or boxes
    joined by "or", or different boxes in one tag.

    Raises ValueError on another format.
    """
    if answer_format not in ("answer_tag", "boxed", "hashes"):
        raise ValueError(f"answer_format={answer_format!r} is unknown; use answer_tag, boxed or hashes")
    if not text:
        return None
    text = without_thoughts(text)
    tagged = tagged_answer(text)
    if answer_format == "answer_tag":
        answer = _unboxed(tagged or "")
    elif answer_format == "boxed":
        found = boxes(text if tagged is None else tagged)
        answer = _last(text, found) if tagged is None else _unboxed(tagged) if found else ""
    else:
        _, hashes, rest = (text if tagged is None else tagged).rpartition("####")
        answer = rest.partition("\n")[0] if hashes else ""
    return answer.strip() or None


def find_answer(text: str) -> str | None:
    """The final answer wherever it stands: in a tag, in boxes, behind "final answer is", as the last formula or number.

    Looser than extract_answer. None if there is nothing of these.
    """
    text = without_thoughts(text)
    tagged = tagged_answer(text)
    if tagged is not None:
        return _unboxed(tagged).strip() or None
    found = boxes(text)
    if found:
        return _last(text, found).strip() or None
    _, announced, rest = text.rpartition("inal answer is")
    rest = rest if announced else text
    formulas = [match[0].strip("$") for match in _FORMULA.finditer(rest) if not _PROSE.search(match[0])]
    if formulas:
        return formulas[-1]
    numbers = list(_NUMBER_IN_PROSE.finditer(rest))
    return numbers[-1][0].strip() if numbers else None


# Bounded, so that "\(" without an end costs the same wherever it stands.
_FORMULA = re.compile(
    r"\$\$[^$]{1,300}\$\$|(?<![\\\d])\$[^$\n]{1,300}(?<!\\)\$|\\\(.{1,300}?\\\)|\\\[.{1,300}?\\\]", re.DOTALL
)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}(?![a-zA-Z}])")
# With its sign and the rest of its clause, which may say millions or go on calculating.
_NUMBER_IN_PROSE = re.compile(
    r"(?<![\w.,/^$€£¥₹-])[-+±\u2010-\u2015\u2212$€£¥₹]{0,3} ?"
    r"(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?: ?/ ?[0-9]+)?(?![0-9])"
    r"[^\n.,;:!?=()0-9+*/^\\<>-]{0,60}(?:[!+*/^<>-]|\\(?!f?box))?"
)


def without_thoughts(text: str) -> str:
    """The text without <think>..</think> blocks.

    A block that never ends hides all that follows; a closing tag without an opening one (chat templates open <think> in
    the prompt) hides all that stands before it. Nested blocks are hidden as a whole.
    """
    if "<" not in text:
        return text
    thoughts, closed, rest = text.rpartition("</think>")
    if closed and thoughts.startswith("<think>") and thoughts.rfind("<") == 0 and "think" not in rest.lower():
        return rest  # the usual completion, without the long way
    shown, start, depth = [], 0, 0  # `start` is where the current stretch of shown text, or of thoughts, begins
    fallback = None  # behind the last closing tag of a block that has not ended
    for tag in _THINK_TAG.finditer(text):
        if not tag["close"]:
            if depth == 0:
                shown.append(text[start : tag.start()])
                fallback = None
            depth += 1
        elif depth > 1:
            depth, fallback = depth - 1, tag.end()
        else:
            if depth == 0:
                shown.clear()
            depth, start = 0, tag.end()
    if depth == 0:
        shown.append(text[start:])
    elif fallback is not None:  # a <think> that the thoughts only mention: the last closing tag ends them
        shown.append(text[fallback:])
    return "".join(shown)


def tagged_answer(text: str) -> str | None:
    """The content of the last complete <answer>..</answer>, "" if two are joined by "or"; None without one.

    Of "<answer> 1 <answer> 2 </answer>" the answer is 2.
    """
    if "<" not in text:
        return None
    if text.startswith("<answer>") and text.endswith("</answer>") and text.count("<") == 2:
        return text[len("<answer>") : -len("</answer>")]  # the usual one, without the long way
    found, opened = [], None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag["close"]:
            opened = tag
        elif opened:
            found.append((opened.start(), tag.end(), text[opened.end() : tag.start()]))
            opened = None
    if len(found) > 1 and _is_choice(text, found):
        return ""
    return found[-1][2] if found else None


Span = tuple[int, int, str]  # start, end, content


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
    """The last of several boxes with those it makes one list with; "" for a choice between them."""
    if not found or _is_choice(text, found):
        return ""
    contents = [found[-1][2].strip()]
    for (_, end, content), (start, _, _) in zip(reversed(found[:-1]), reversed(found), strict=False):
        if not _ALSO.fullmatch(text[end:start]):
            break
        contents.append(content.strip())
    if len(set(contents)) == 1:
        return _unbox_inner(contents[0])
    return ", ".join(_unbox_inner(content) for content in reversed(contents))


def _is_choice(text: str, found: list[Span]) -> bool:
    (_, end, before), (start, _, last) = found[-2:] if len(found) > 1 else (found[0], found[0])
    return end <= start and bool(_OR.fullmatch(text[end:start])) and before.strip() != last.strip()


def _unboxed(text: str) -> str:
    """An answer's text with its box taken off: one box in some words is the answer, different boxes are none."""
    if "box" not in text:
        return text
    found = boxes(text)
    if not found:
        return _EMPTY_BOX.sub("", text)
    return _unbox_inner(found[-1][2]) if len({content.strip() for _, _, content in found}) == 1 else ""


_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")


def _unbox_inner(content: str) -> str:
    content = _BOX_COMMAND.sub("", _EMPTY_BOX.sub("", content)).strip()
    return content[1:-1] if content[:1] == "{" and content[-1:] == "}" else content
