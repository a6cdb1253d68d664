"""Count the sampled turns of a run's recorded batches whose ids differ when their text is tokenized again.

    python -m tests.bench.reencoded RUN_DIR MODEL_DIR

The run needs --record. A turn is what was sampled in a row, without the token that ended it.
"""

import itertools
import pathlib
import sys

from transformers import AutoTokenizer

from grpo.data.recorded import BATCHES
from grpo.tools.recorded import read_step


def turns_of(batch):
    """Yield the ids of each turn that the batch trains."""
    place = 0
    for length in batch.lengths_S.tolist():
        ids = batch.ids_N[place : place + length].tolist()
        mask = batch.loss_mask_N[place : place + length].tolist()
        place += length
        for is_turn, tokens in itertools.groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
            if is_turn:
                yield [token for _, token in tokens]


def main(run_dir: str, model_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    num_turns = 0
    num_tokens = 0
    num_differ = 0
    for path in sorted(pathlib.Path(run_dir, BATCHES).glob("step-*")):
        step = int(path.stem.removeprefix("step-"))
        for ids in turns_of(read_step(run_dir, step).batch):
            if ids[-1] in tokenizer.all_special_ids:
                ids = ids[:-1]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            num_turns += 1
            num_tokens += len(ids)
            num_differ += tokenizer(text, add_special_tokens=False)["input_ids"] != ids
    print(f"{num_differ} of {num_turns} turns, {num_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
