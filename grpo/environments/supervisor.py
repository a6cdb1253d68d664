"""The parent of the environment processes: it gives each episode a process and carries its messages.

    python -m grpo.environments.supervisor FD    (host.py starts it; FD is its end of a socketpair)

The user's file is imported here once, and processes are forked from it: a start costs milliseconds, whatever the file
imports. An episode keeps its process until it has finished; where there are only functions as tools, any process
answers any turn. A process is reused with a new object, and replaced when it had to be killed.

Lines of JSON: from the head `{episode, do, with, seconds}`; to it `{episode, ...}`, what worker.py replied, or
`{episode, failed, kind}`. `kind` is `hung` where the process was computing when its time was over, which the policy's
call has most likely caused; `lost` where it was waiting or died, which the policy cannot have caused.
"""

import collections
import json
import os
import sys
import time
from typing import Any

from grpo.config import EnvironmentConfig
from grpo.environments.tools import load_toolboxes
from grpo.environments.worker import work
from grpo.rewards.worker import describe, shown
from grpo.workers import processes

# Share of the seconds waited for that a process must have computed in, to have hung by its own work.
COMPUTING_FRAC = 0.2


class EnvironmentWorker(processes.Worker):
    """A process; `asked` is the message that it works on, `episode` whose it is, None if anybody's."""

    asked: dict[str, Any] | None = None
    episode: int | None = None
    kind = ""
    """Of the failure that it reported, if it did."""
    asked_at = cpu_seconds = 0.0


class Supervisor(processes.Parent):
    """Sends messages to the processes of their episodes, and starts as many processes as there may be."""

    def begin(self) -> None:
        """Read the first line, load the user's file, say so."""
        first = json.loads(self.reader.readline())
        self.owner.setblocking(False)
        self.inbox, self.outbox = b"", bytearray()
        self.config, self.style = EnvironmentConfig(**first["config"]), first["style"]
        self.num_processes = first["num_processes"]
        self.queue: collections.deque[dict[str, Any]] = collections.deque()
        os.chdir(first["folder"])
        sys.path[:] = first["path"]
        self.own_temporary_folder()
        try:
            self.toolboxes = load_toolboxes(self.config)
        except BaseException as error:  # a user's file may raise anything
            self._tell({"failed": str(error) if isinstance(error, ValueError) else describe(error)})
            raise processes.Finished from error
        self._tell({"loaded": True})

    def step(self) -> float:
        """Hand out what can be; what is asked of an episode whose process is busy or gone is handled in order."""
        held = collections.deque()
        while self.queue:
            message = self.queue.popleft()
            try:
                worker = self._worker_for(message)
            except StopIteration:
                self._fail(message, "its process ended between two turns", "lost")
                continue
            except OSError as error:
                self._fail(message, f"no process can be started: {error}", "lost")
                continue
            if worker is None:
                held.append(message)
            else:
                self._ask(worker, message)
        self.queue = held
        self._flush()
        return float("inf")

    def _worker_for(self, message: dict[str, Any]) -> EnvironmentWorker | None:
        """The episode's own process, else an idle one, else a new one; None if it must wait."""
        workers = [worker for worker in self.workers.values() if not worker.closed]
        if self.config.all_classes and message["do"] != "reset":
            return next(worker for worker in workers if worker.episode == message["episode"])
        if worker := next((w for w in workers if w.episode is None and w.asked is None), None):
            return worker
        if len(self.workers) >= self.num_processes:
            return None
        return self.start(
            EnvironmentWorker,
            self.config.memory_gib,
            lambda connection: work(self.toolboxes, self.config, self.style, connection),
        )

    def _ask(self, worker: EnvironmentWorker, message: dict[str, Any]) -> None:
        worker.asked, worker.asked_at, worker.cpu_seconds = message, time.monotonic(), cpu_seconds(worker.pid)
        worker.episode = message["episode"] if self.config.all_classes else None
        worker.must_end_in(message["seconds"], f"{message['do']} took")
        self.send(worker, json.dumps({"do": message["do"], "with": message["with"]}).encode() + b"\n")

    def on_owner(self) -> None:
        """Take in messages from the head."""
        data = self.owner.recv(1 << 20)
        if not data:
            raise EOFError
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for message in map(json.loads, lines):
            if message["do"] == "drop":  # the head gave the episode up
                for worker in [w for w in self.workers.values() if w.episode == message["episode"]]:
                    worker.asked = None
                    self.end(worker, None)
            else:
                self.queue.append(message)

    def on_line(self, worker: EnvironmentWorker, line: bytes) -> bool:
        """Carry a reply to the head; one that failed ends the process, since its object is no more to be trusted."""
        if worker.asked is None:
            return False
        try:
            reply = json.loads(line)
        except ValueError:
            return False
        if not isinstance(reply, dict):
            return False
        if "failed" in reply:
            worker.kind = "hung" if reply.get("kind") == "hung" else "lost"
            self.end(worker, shown(str(reply["failed"])))
            return True
        asked, worker.asked, worker.deadline = worker.asked, None, float("inf")
        if asked["do"] == "finish":
            worker.episode = None
        self._tell({"episode": asked["episode"], **reply})
        return True

    def on_end(self, worker: EnvironmentWorker, reason: str | None) -> None:
        """Say what became of the message that the process worked on; a failed reset is tried once more elsewhere."""
        if (asked := worker.asked) is None:
            return
        seconds = time.monotonic() - worker.asked_at
        computed = (cpu_seconds(worker.pid) - worker.cpu_seconds) / max(seconds, 1e-3)  # it is not reaped yet
        is_late = seconds >= asked["seconds"]
        if asked["do"] == "reset" and not asked.get("again"):
            self.queue.appendleft(asked | {"again": True})
        elif is_late and asked["do"] == "turn" and not self.config.all_classes:
            answer = f"It took longer than {asked['seconds']:g} s and was stopped."
            counts = {"calls": 1, "hung_calls": 1}
            self._tell({"episode": asked["episode"], "answers": [answer], "role": "", "ended": False, "counts": counts})
        else:
            hung = asked["do"] == "turn" and is_late and computed >= COMPUTING_FRAC
            self._fail(asked, reason, worker.kind or ("hung" if hung else "lost"))

    def _fail(self, message: dict[str, Any], reason: str, kind: str) -> None:
        self._tell({"episode": message["episode"], "failed": f"{message['do']}: {reason}", "kind": kind})

    def _tell(self, message: dict[str, Any]) -> None:
        self.outbox += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Send what the head's socket takes; the rest goes with a later step, at the latest after LOOK_SECONDS."""
        try:
            while self.outbox:
                del self.outbox[: self.owner.send(self.outbox)]
        except BlockingIOError:
            pass


def cpu_seconds(pid: int) -> float:
    """What the process and its children that have ended have computed, in seconds."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # pid (command) state ...; the command may hold blanks
            return sum(map(int, file.read().rpartition(b")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


if __name__ == "__main__":
    processes.serve(Supervisor)
