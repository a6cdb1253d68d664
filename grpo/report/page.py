"""A run as one page, `RUN_DIR/look.html`: curves, rollouts, tokens. It needs no server, no network, no other file.

page.html is the template: all that the page shows and does, without data. Data are gzipped JSON in base64, which cannot
end a tag; each step is a piece that the page unpacks when it is asked for. Tokens, their log-probs and the loss mask
come from `RUN_DIR/batches`, so only a run with `record` has them. Left out: the policy's log-probs, which no file has
for each token; `mismatch` is their mean distance from the generator's.
"""

import base64
import contextlib
import functools
import gzip
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from grpo.data.chat import open_tokenizer
from grpo.data.recorded import batch_path, read_step
from grpo.types import TrainBatch

TEMPLATE = pathlib.Path(__file__).with_name("page.html")
DATA = "<!-- data -->"  # their place in it
CHARACTER_BYTES = 4  # the most of a character in UTF-8, and so the most tokens


def write_page(
    run_dir: pathlib.Path, metrics: list[dict[str, Any]], rollouts: Iterable[dict[str, Any]], models: list[str]
) -> pathlib.Path:
    """Write the page and return its path. Raises ValueError if a recorded batch cannot be read.

    metrics, rollouts: the records of the run's .jsonl files, rollouts of one step and kind side by side. models:
    folders or hub names; the first that has a tokenizer gives the tokens their texts.
    """
    steps, pieces = [], []
    spell = functools.cache(lambda: speller(models))  # opened only if there is a batch
    for (step, kind), group in itertools.groupby(rollouts, lambda record: (record["step"], record.get("kind", ""))):
        records = list(group)
        if not kind and batch_path(run_dir, step).is_file() and spell():
            add_tokens(records, read_step(run_dir, step).batch, spell())
        steps.append({"step": step, "kind": kind or "trained on", "rollouts": len(records)})
        pieces.append(_packed(records))
    pieces.insert(0, _packed({"name": str(run_dir), "metrics": metrics, "steps": steps}))
    data = "\n".join(f'<script type="text/plain" id="piece-{i}">{piece}</script>' for i, piece in enumerate(pieces))
    path, partial = run_dir / "look.html", run_dir / "look.html.tmp"
    partial.unlink(missing_ok=True)
    with open(partial, "x", encoding="utf-8") as file:  # not through a link that somebody put there
        file.write(TEMPLATE.read_text(encoding="utf-8").replace(DATA, data, 1))
    partial.replace(path)
    return path


def add_tokens(records: list[dict[str, Any]], batch: TrainBatch, spell: Callable[[list[int]], list[str]]) -> None:
    """Give each record of a step its `tokens` behind the prompt: texts, what was sampled, loss mask, log-probs.

    The sequences of the batch are in the records' order. A record without an advantage is out of the loss, which its
    batch, recorded before the advantages, does not say yet. A log-prob is None where no token was sampled.
    """
    starts = (batch.starts_S + batch.prompt_lengths_S).tolist()
    ends = (batch.starts_S + batch.lengths_S).tolist()
    # a sampled token is not in the mask if its log-prob is not finite
    sampled_N = batch.loss_mask_N | ~batch.generator_logprobs_N.isfinite()
    for record, start, end in zip(records, starts, ends, strict=True):
        mask_T, logprobs = batch.loss_mask_N[start:end], {}
        for name, values_N in (("generator", batch.generator_logprobs_N), ("reference", batch.ref_logprobs_N)):
            if values_N is not None:
                pairs = zip(values_N[start:end].tolist(), mask_T.tolist(), strict=True)
                logprobs[name] = [round(value, 3) if known else None for value, known in pairs]
        record["tokens"] = {
            "texts": spell(batch.ids_N[start:end].tolist()),
            "sampled": sampled_N[start:end].int().tolist(),
            "in_loss": (mask_T & (record["advantage"] is not None)).int().tolist(),
            "logprobs": logprobs,
        }


def speller(models: list[str]) -> Callable[[list[int]], list[str]] | None:
    """A function from token ids to the text of each; joined they are the whole text. None if there is no tokenizer.

    A character of several tokens is the last one's text, and the others have none.
    """
    tokenizer = None
    for model in models:
        with contextlib.suppress(ValueError):
            tokenizer = tokenizer or open_tokenizer(model)
    if not tokenizer:
        return None
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before = tokenizer.encode("a", add_special_tokens=False)  # some tokenizers drop a blank at the beginning
    text_of = functools.cache(lambda ids: decode([*before, *ids])[len(decode(before)) :])

    def spell(ids: list[int]) -> list[str]:
        texts, waiting = [], ()
        for token in ids:
            waiting += (token,)
            text = text_of(waiting)
            is_part = text.endswith("\ufffd") and len(waiting) < CHARACTER_BYTES
            texts.append("" if is_part else text)
            waiting = waiting if is_part else ()
        return texts

    return spell


def _packed(value: Any) -> str:
    return base64.b64encode(gzip.compress(json.dumps(value).encode(), 6)).decode()
