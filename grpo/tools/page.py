"""Runs as one page, `RUN_DIR/look.html`: curves, rollouts, tokens. It needs no server, no network, no other file.

page.html is the page without data. The data are gzipped JSON in base64, which cannot end a tag; each step is a piece
that the page unpacks when the reader opens it. Tokens, their log-probs and the loss mask come from `RUN_DIR/batches`,
so only a run with `record` has them. Left out: the policy's log-probs, which no file has for each token; `mismatch` is
their mean distance from the generator's.
"""

import base64
import contextlib
import functools
import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo.data.chat import open_tokenizer, token_texts
from grpo.data.recorded import batch_path
from grpo.text import replace_file
from grpo.tools.recorded import read_step
from grpo.types import Record, TrainBatch

TEMPLATE = Path(__file__).with_name("page.html")
DATA = "<!-- data -->"  # where the data go in the template


@dataclass(frozen=True)
class PageRun:
    """A run on the page."""

    folder: Path
    facts: list[str]
    """What stands below its name."""
    lines: dict[str, list[Record]]
    """Metrics by the name of their line in the charts: the run's, or each of its methods'."""
    rollouts: Iterable[Record]
    """Those of one step and kind next to each other."""
    models: list[str]
    """Folders or hub names; the first that has a tokenizer gives the tokens their texts."""


def write_page(runs: list[PageRun]) -> Path:
    """Write the page into the first run's folder, return its path. Its name has the other runs'.

    Raises ValueError if a batch cannot be read.
    """
    steps = []
    pieces = []
    for run in runs:
        spell = functools.cache(partial(speller, run.models))  # opens a tokenizer only if there is a batch
        # the kind is empty for completions that were trained on
        by_step = itertools.groupby(run.rollouts, lambda record: (record["step"], record.get("kind", "")))
        for (step, kind), group in by_step:
            records = list(group)
            is_recorded = not kind and batch_path(run.folder, step).is_file()
            if is_recorded and spell():
                batch = read_step(run.folder, step).batch
                add_tokens(records, batch, spell())
            steps.append(
                {
                    "run": str(run.folder),
                    "step": step,
                    "kind": kind or "trained on",
                    "rollouts": len(records),
                }
            )
            pieces.append(_packed(records))
    overview = {
        "titles": [[str(run.folder), *run.facts] for run in runs],
        "lines": [line for run in runs for line in run.lines.items()],
        "steps": steps,
    }
    pieces.insert(0, _packed(overview))

    tags = [f'<script type="text/plain" id="piece-{i}">{piece}</script>' for i, piece in enumerate(pieces)]
    data = "\n".join(tags)
    template = TEMPLATE.read_text(encoding="utf-8")
    page = template.replace(DATA, data, 1)

    others = "".join(f"-{run.folder.name}" for run in runs[1:])
    path = runs[0].folder / f"look{others}.html"
    replace_file(path, page)
    return path


def add_tokens(
    records: list[Record],
    batch: TrainBatch,
    spell: Callable[[list[int]], list[str]],
) -> None:
    """Add `tokens` to each record of a step: texts after the prompt, what was sampled, loss mask, log-probs.

    The rollouts of the batch are in the records' order. Of several sequences each later one has its prompt too, and
    what it repeats stands there as not sampled. A record without an advantage is out of the loss; its batch does not
    say so, because it was recorded before the advantages. A log-prob is None where no token was sampled.
    """
    lengths_R = torch.zeros(batch.num_rollouts, dtype=torch.int64).index_add(
        0,
        batch.rollout_S,
        batch.lengths_S,
    )
    ends_R = lengths_R.cumsum(0)
    first_S = batch.rollout_S.diff(prepend=torch.tensor([-1])) > 0
    starts_R = ends_R - lengths_R + batch.prompt_lengths_S[first_S]
    # a sampled token is not in the mask if its log-prob is not finite
    sampled_N = batch.loss_mask_N | ~batch.generator_logprobs_N.isfinite()
    logprobs_N = {"generator": batch.generator_logprobs_N}
    if batch.ref_logprobs_N is not None:
        logprobs_N["reference"] = batch.ref_logprobs_N
    starts = starts_R.tolist()
    ends = ends_R.tolist()
    for record, start, end in zip(records, starts, ends, strict=True):
        tokens_of_piece = slice(start, end)
        mask_T = batch.loss_mask_N[tokens_of_piece]
        in_loss_T = mask_T & (record["advantage"] is not None)
        are_known = mask_T.tolist()
        logprobs = {}
        for name, values_N in logprobs_N.items():
            logprobs[name] = []
            values = values_N[tokens_of_piece].tolist()
            for value, is_known in zip(values, are_known, strict=True):
                shown = round(value, 3) if math.isfinite(value) else str(value)
                logprobs[name].append(shown if is_known else None)
        ids = batch.ids_N[tokens_of_piece].tolist()
        record["tokens"] = {
            "texts": spell(ids),
            "sampled": sampled_N[tokens_of_piece].int().tolist(),
            "in_loss": in_loss_T.int().tolist(),
            "logprobs": logprobs,
        }


def speller(models: list[str]) -> Callable[[list[int]], list[str]] | None:
    """Return `token_texts` of the first of these models that has a tokenizer, or None."""
    for model in models:
        with contextlib.suppress(ValueError):
            return partial(token_texts, open_tokenizer(model))
    return None


def _packed(value: Any) -> str:
    """Return a JSON value as base64 of its gzipped text."""
    text = json.dumps(value, allow_nan=False)  # a browser does not read NaN
    zipped = gzip.compress(text.encode(), 6)
    return base64.b64encode(zipped).decode()
