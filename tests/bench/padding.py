"""How fast questions and answers become tokens with their labels, and the share of padding in packed rows.

    python tests/bench/padding.py TRAIN.jsonl

with GSM8K's `question` and `answer` columns and a tokenizer trained on them. Steps of 128 chats in a random order.
"""

import json
import pathlib
import random
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from grpo.config import DataConfig
from grpo.data.packing import plan_rows
from grpo.data.rows import ChatColumns, read_chat
from grpo.data.toy import trained_tokenizer
from grpo.data.turns import tokenize, write_example

CHATS_PER_STEP = 128
ROW_TOKENS = (640, 1024, 2048, 4096, 8192)
NUM_RANKS = (1, 2, 8)
MULTIPLE = 128


def main(path: str) -> None:
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    tokenizer = trained_tokenizer(row[column] for row in rows for column in ("question", "answer"))
    start = time.process_time()
    chats = [read_chat("prompt_completion", ChatColumns("question", "answer"), row) for row in rows]
    written = [write_example(tokenizer, DataConfig(), chat, "assistant") for chat in chats]
    encoded = list(tokenize(tokenizer, written))
    seconds = time.process_time() - start
    lengths = [len(ids) for ids, _ in encoded]
    num_labels = sum(sum(mask) for _, mask in encoded)
    print(f"{len(rows)} chats, {sum(lengths)} tokens, {num_labels} labels in {seconds:.1f} CPU seconds")
    print(f"tokens {min(lengths)} to {max(lengths)}, median {statistics.median(lengths):.0f}")
    random.Random(0).shuffle(lengths)
    starts = range(0, len(lengths) - CHATS_PER_STEP + 1, CHATS_PER_STEP)
    steps = [lengths[first : first + CHATS_PER_STEP] for first in starts]
    for max_tokens in ROW_TOKENS:
        for num_ranks in NUM_RANKS:
            print(f"rows of {max_tokens:4}, ranks {num_ranks}: {padding(steps, num_ranks, max_tokens)}")


def padding(steps: list[list[int]], num_ranks: int, max_tokens: int) -> str:
    """Rows per step, counting the empty ones of ranks that have fewer, and the share of padding."""
    num_rows = num_positions = 0
    for lengths in steps:
        rows = [row for of_rank in plan_rows(lengths, num_ranks, max_tokens) for row in of_rank]
        longest = max(sum(lengths[index] for index in row) for row in rows)
        num_rows += len(rows)
        num_positions += len(rows) * -(-longest // MULTIPLE) * MULTIPLE
    return f"{num_rows / len(steps):.2f} rows, padding {1 - sum(map(sum, steps)) / num_positions:.4f}"


if __name__ == "__main__":
    main(*sys.argv[1:])
