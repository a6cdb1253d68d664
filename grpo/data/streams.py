"""The order in which encoded rows are drawn, by epochs and weights. It resumes exactly.

Only the driver (rank 0) reads data; generators and trainers see token ids.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from grpo.config import DataConfig
from grpo.config.user_files import cause_and_line, load_function
from grpo.data.encode import Encoded, EncodedRows
from grpo.types import Prompt, check_saved


@dataclass(frozen=True)
class Seen:
    """What is known of a row whose completions were scored."""

    pass_rate: float
    """Share of its completions that passed when it was seen last."""
    times: int
    """Number of groups that were scored."""
    step: int
    """Step in which it was seen last, counted as in the log."""


# Epochs without a prompt that is kept, after which none is expected. A row may have a small chance by the curriculum.
MAX_EPOCHS = 100
# A place in the data, fit for JSON
State = dict[str, Any]
Curriculum = Callable[[Seen, int], float]
"""What is known of a row, the step's number -> the row's weight."""


class Order:
    """The order of the usable rows of a source, epoch after epoch; it can be saved and resumed.

    The order of an epoch follows from the seed and the epoch's number alone, so no global RNG is touched, and the place
    is the number of rows that had their turn. With a curriculum, a row can be passed over when its turn comes.
    """

    def __init__(self, rows: EncodedRows, seed: int, shuffle: bool):
        """Begin at the first row of the first epoch."""
        self.rows = rows
        self.num_rows = len(rows.usable)
        self.source = rows.source.text
        self.label = rows.source.label
        self.seed = seed
        self.shuffle = shuffle
        self.num_drawn = 0
        self.seen: dict[int, Seen] = {}
        self.chances: dict[int, float] = {}  # of rows that were seen
        self.unseen_chance = 1.0
        self._epoch = -1
        self._epoch_rows: list[int] = []

    def weigh(self, curriculum: Curriculum, step: int) -> None:
        """Give each row its chance of being drawn when its turn comes: its weight divided by the largest weight.

        A row that was not seen has the weight 1. If every weight is 0, rows are drawn alike, with a warning.
        """
        weights = {row: curriculum(seen, step) for row, seen in self.seen.items()}
        unseen_weight = float(len(weights) < self.num_rows)
        largest = max(unseen_weight, *weights.values(), 0.0)
        if largest == 0:
            print(f"warning: step {step}: data.curriculum gives every row of {self.source} the weight 0")
            weights = dict.fromkeys(weights, 1.0)
            largest = 1.0
        self.chances = {row: weight / largest for row, weight in weights.items()}
        self.unseen_chance = unseen_weight / largest

    def draw(self) -> int:
        """Return the place of the next row in the source."""
        while True:
            row = self._next_row()
            chance = self.chances.get(row, self.unseen_chance)
            if random.Random(f"{self.seed} {self.num_drawn} {self.label} curriculum").random() < chance:
                return row

    def _next_row(self) -> int:
        epoch, position = divmod(self.num_drawn, self.num_rows)
        if self._epoch != epoch:
            self._epoch = epoch
            self._epoch_rows = list(self.rows.usable)
            if self.shuffle:
                epoch_seed = f"{self.seed} {epoch} {self.label}".rstrip()
                random.Random(epoch_seed).shuffle(self._epoch_rows)
        self.num_drawn += 1
        return self._epoch_rows[position]

    def state_dict(self) -> State:
        """Return the place in the rows and what is known of them; fit for JSON."""
        return {
            "num_drawn": self.num_drawn,
            "seen": [[row, *astuple(seen)] for row, seen in self.seen.items()],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken, in the same rows. Raises ValueError if another version saved it."""
        check_saved(f"the place in {self.source}", state, self.state_dict())
        self.num_drawn = state["num_drawn"]
        self.seen = {row: Seen(*facts) for row, *facts in state["seen"]}


class Stream:
    """Rows of several sources in turn, each with epochs of its own. It resumes exactly.

    At each draw every source is owed its share of a row, and the source that is owed most gives the next row. So after
    n draws each source has given its share of n, up to less than one row per source, without randomness.
    """

    def __init__(self, sources: Sequence[EncodedRows], data: DataConfig, seed: int):
        """Begin with the first row of each source."""
        self.orders = {rows.source.label: Order(rows, seed, data.shuffle) for rows in sources}
        self._owed = dict.fromkeys(self.orders, 0.0)  # rows
        self.set_shares({rows.source.label: rows.source.weight for rows in sources})

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Draw by these shares of the sources (`data.weights`) from now on; 1 for a source without one, 0 draws none.

        Raises ValueError for an unknown name, and if no share is above 0.
        """
        unknown = [name for name in shares if name not in self.orders]
        if unknown:
            raise ValueError(f"weights name {unknown}, and data.path has {list(self.orders)}")
        self.shares = {name: float(shares.get(name, 1.0)) for name in self.orders}
        total = sum(self.shares.values())
        if min(self.shares.values()) < 0 or not 0 < total < math.inf:
            raise ValueError(f"weights are {self.shares}; each must be 0 or more, and one above 0")

    @property
    def num_drawn(self) -> int:
        """Number of rows drawn from all sources."""
        return sum(order.num_drawn for order in self.orders.values())

    @property
    def sources_drawn(self) -> list[str]:
        """Names of the sources with a share above 0."""
        return [name for name, share in self.shares.items() if share]

    def next_order(self) -> Order:
        """Return the source whose turn it is; the call counts as its draw."""
        total = sum(self.shares.values())
        for name, share in self.shares.items():
            self._owed[name] += share / total
        # rounded, because max then takes the first of equals, in the order of the config
        name = max(self.sources_drawn, key=lambda name: round(self._owed[name], 9))
        self._owed[name] -= 1
        return self.orders[name]

    def state_dict(self) -> State:
        """Return the place in each source, see Order.state_dict, and the rows owed to each; fit for JSON."""
        return {
            "sources": {label: order.state_dict() for label, order in self.orders.items()},
            "owed": dict(self._owed),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken, in the same sources. Raises ValueError if another version saved it."""
        check_saved("the place in the data", state, self.state_dict())
        for label, order in self.orders.items():
            order.load_state_dict(state["sources"][label])
        self._owed = dict(state["owed"])


class PromptStream(Stream):
    """The run's prompts, one after the other without end. All that decides which ones are drawn meets here.

    Rows that `data.row` left out are not in the sources. The shares say whose turn it is; that source's epoch gives
    the next row, which the curriculum may pass over; then `keep_prompt` may refuse it. Dynamic sampling, last, drops
    whole groups after they were sampled (`run/groups.py`).
    """

    def __init__(self, sources: Sequence[EncodedRows], data: DataConfig, seed: int):
        """Load and try `data.curriculum`, if there is one; raises ValueError if it cannot be used."""
        super().__init__(sources, data, seed)
        self.keep_prompt: Callable[[Prompt], bool] | None = None
        self.curriculum = None
        if data.curriculum:
            self.curriculum = checked_curriculum(data.curriculum)
            self.curriculum(Seen(pass_rate=0.5, times=1, step=1), 2)

    def begin_step(
        self,
        step: int,
        shares: Mapping[str, float] | None = None,
        keep_prompt: Callable[[Prompt], bool] | None = None,
    ) -> None:
        """Say what is drawn from now on. step: its number, counted as in the log, for the curriculum.

        shares: of the sources, see `set_shares`; None leaves them. keep_prompt: prompts for which it returns False
        are passed over.
        """
        if shares is not None:
            self.set_shares(shares)
        self.keep_prompt = keep_prompt
        if self.curriculum:
            for order in self.orders.values():
                order.weigh(self.curriculum, step)

    def remember(self, prompt: Prompt, pass_rate: float, step: int) -> None:
        """Note the pass rate of a prompt's completions, which were scored in step number `step`."""
        seen = self.orders[prompt.source].seen
        times = 1
        if prompt.row in seen:
            times += seen[prompt.row].times
        seen[prompt.row] = Seen(pass_rate, times, step)

    def draw(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, across epochs where needed. Prompt.index counts on through the whole run.

        Raises ValueError if all prompts of MAX_EPOCHS epochs are refused.
        """
        prompts = []
        last_index = self.num_drawn
        while len(prompts) < count:
            index = self.num_drawn
            order = self.next_order()
            row = order.draw()
            prompt = order.rows.prompt(row, index)
            if self.keep_prompt is None or self.keep_prompt(prompt):
                prompts.append(prompt)
                last_index = index
                continue
            num_rows = sum(self.orders[name].num_rows for name in self.sources_drawn)
            if index - last_index > MAX_EPOCHS * num_rows:
                raise ValueError(f"keep_prompt and data.curriculum leave none of {num_rows} rows; leave some")
        return prompts


class ChatStream(Stream):
    """Chats and texts for SFT with their labels, one after the other without end."""

    def draw(self, count: int) -> list[Encoded]:
        """Return the next `count` examples, across epochs where needed."""
        examples = []
        for _ in range(count):
            order = self.next_order()
            examples.append(order.rows.get(order.draw()))
        return examples


def checked_curriculum(spec: str) -> Curriculum:
    """Return the curriculum of that name. It raises ValueError for anything other than a finite weight of at least 0.

    Raises what `load_function` does.
    """
    function = load_function(spec, "data.curriculum")

    def checked(seen: Seen, step: int) -> float:
        try:
            weight = function(seen, step)
            is_weight = 0 <= weight < math.inf
        except Exception as error:  # a user's function may raise anything
            cause = cause_and_line(error, spec.rpartition(":")[0])
            raise ValueError(f"data.curriculum {spec}{cause}; it is called as curriculum(seen, step)") from error
        if not is_weight:
            raise ValueError(
                f"data.curriculum {spec} returned {weight} for {seen}; return a finite number of 0 or more"
            )
        return weight

    return checked
