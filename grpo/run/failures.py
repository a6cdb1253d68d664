"""How a rank ends: the rank that failed first prints one clear message, the others print nothing.

When a rank dies, all others fail too, in the collective they were waiting in. Before they print their own error they
wait a while, in which torchrun ends them; only a rank that is still running afterwards says where it waited.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from grpo.text import printable

# torchrun looks every 0.1 s for a dead rank and then gives the others 30 s to end
FOLLOWER_PATIENCE_SECONDS = 15
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out")

Result = TypeVar("Result")

_place = {"rank": os.environ.get("RANK", "0"), "role": "rank", "phase": "start"}


class BadInput(Exception):
    """The user's input cannot work. The message says why and what to do; rank 0 prints it without a traceback."""


def set_place(*, role: str | None = None, phase: str | None = None) -> None:
    """Remember this rank's role and current phase, for the message it prints if it fails."""
    _place.update({key: value for key, value in (("role", role), ("phase", phase)) if value})


@contextlib.contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Turn a ValueError, a missing file or one that already exists into `BadInput`, in a block that checks input."""
    try:
        yield
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise BadInput(str(error)) from error


def run_rank(main: Callable[[], Result]) -> Result:
    """What `main` returns; if it fails, print one message and end the process with a non-zero exit code.

    The process then skips destructors, because process groups whose peers are gone would print errors or hang.
    """
    # taken now, because roles rewrite RANK to the role's own
    rank = _place["rank"] = os.environ.get("RANK", "0")
    code, quiet = 1, False
    try:
        return main()
    except SystemExit as stop:
        quiet = True
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BadInput as error:
        quiet = True
        if rank == "0":
            print(f"error: {printable(str(error))}", file=sys.stderr)
    except BaseException as error:
        if any(sign in str(error) for sign in LOST_PEER):
            time.sleep(FOLLOWER_PATIENCE_SECONDS)
        message = f"error: rank {rank} ({_place['role']}) failed in phase {_place['phase']}: {error}"
        # printable: it may quote a completion
        print(printable(f"{traceback.format_exc()}{message}"), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code and rank != "0" and quiet:
        time.sleep(FOLLOWER_PATIENCE_SECONDS)  # torchrun kills all at the first exit; let the driver print first
    os._exit(code)
