"""The rows of the next step, read and tokenized in a thread while this step trains.

A row takes a fraction of a millisecond, a step of eight GPUs hundreds of them: without this every GPU would wait for
rank 0. Tokenizers work outside Python's lock, and a rank that trains mostly waits for its GPU. A chat template has no
deadline of its own in a thread, which gets no signals; whoever waits for it has that of the phase.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from grpo.data.streams import ChatStream, Labelled, PromptStream
from grpo.types import Prompt


class Ahead(NamedTuple):
    """A draw that a thread does."""

    drawn: "Future[list[Prompt] | list[Labelled]]"
    count: int
    place: dict[str, Any]
    """Before it: the stream's `state_dict`, and what it had to tell."""
    told: dict[str, int]


class DrawAhead:
    """A stream that draws ahead where it is told to, which nobody else can see: not its place, its metrics, its errors.

    While it does, nothing but its methods may touch the stream.
    """

    def __init__(self, stream: PromptStream | ChatStream):
        self.stream = stream
        self._thread = ThreadPoolExecutor(1, "draw-ahead")
        self._ahead: Ahead | None = None

    def begin(self, count: int) -> None:
        """Begin with the next draw, of `count` rows. To be called when all is known that decides which they are.

        Raises RuntimeError if the rows of the call before were not drawn: they would be lost.
        """
        if self._ahead:
            raise RuntimeError(f"{self._ahead.count} rows that were read ahead have not been drawn")
        place, told = self.stream.state_dict(), self.stream.metrics()
        self._ahead = Ahead(self._thread.submit(self.stream.draw, count), count, place, told)

    def draw(self, count: int) -> list[Prompt] | list[Labelled]:
        """The next `count` rows; raises what the stream's `draw` raises."""
        ahead = self._settle()
        if ahead is None:
            return self.stream.draw(count)
        if ahead.count == count:
            return ahead.drawn.result()
        self.stream.load_state_dict(ahead.place)
        return self.stream.draw(count)

    def record(self, pass_rates: dict[tuple[str, int], float]) -> None:
        """See PromptStream.record. What was drawn ahead is given back, because it may be filtered now."""
        if ahead := self._settle():
            self.stream.load_state_dict(ahead.place)
        self.stream.record(pass_rates)

    def state_dict(self) -> dict[str, Any]:
        """The place behind what `draw` has returned."""
        return self._ahead.place if self._ahead else self.stream.state_dict()

    def metrics(self) -> dict[str, int]:
        """What the stream counts, by the names of metrics."""
        return self._ahead.told if self._ahead else self.stream.metrics()

    def _settle(self) -> Ahead | None:
        """Wait for the thread; afterwards nothing is drawn ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead:
            ahead.drawn.exception()
        return ahead
