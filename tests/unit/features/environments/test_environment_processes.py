"""Environments in processes of their own: what they say, and what each way of failing comes to."""

import json
import os
import socketserver
import subprocess
import sys
import textwrap
import threading

import pytest

from grpo.config import EnvironmentConfig
from grpo.features.environments.host import MAX_OPENING_CHARACTERS, EnvironmentHost
from grpo.workers.processes import children
from grpo.workers.supervisor import LINE_BYTES
from tests.unit.features.environments.conversations import call, say
from tests.unit.workers.processes import alive, wait_until

ROOM = """
    import errno, os, signal, subprocess, time

    class Room:
        def reset(self, start: int = 0, seed: int = 0, rollout: int = 0, fails: str = ""):
            self.count, self.done, self.fails = start, False, fails
            if fails.isdigit(): return "\U0001f600" * int(fails)
            if fails == "always": raise RuntimeError("no room is free")
            if fails == "memory": self.all = bytearray(2**34)
            return f"Room {seed}, bed {rollout}."

        def add(self, number: int) -> str:
            '''Add.

            Args:
                number: What to add.
            '''
            self.count += number
            self.done = self.count > 9
            return str(self.count)

        def do(self, what: str) -> str:
            '''Do something.

            Args:
                what: What to do.
            '''
            while what == "loop":
                pass
            if what == "sleep": time.sleep(60)
            if what == "child loops": subprocess.run("while true; do true; done", shell=True, start_new_session=True)
            if what == "die": os._exit(3)
            if what == "eat": self.all = bytearray(2**34)
            if what == "flood": return "x" * 10**7
            if what == "smile": return "\U0001f600" * 10**5
            if what == "raise": raise KeyError("attic")
            if what == "interrupt": raise KeyboardInterrupt()
            if what == "too much": self.count = 1e308 * 10
            if what == "broken": self.fails = "reward"
            if what == "net": raise ConnectionResetError(errno.ECONNRESET, "the server is gone")
            if what == "killed": os.kill(os.getpid(), signal.SIGKILL)
            return "done"

        def get_reward(self):
            if self.fails == "reward": raise ValueError("no reward today")
            if self.fails == "none": return None
            return float("nan") if self.fails == "nan" else self.count / 10

        def get_info(self):
            return {"count": self.count}

    def look(place: str) -> str:
        '''Look.

        Args:
            place: Where.
        '''
        while place == "attic":
            pass
        try:
            while place == "shaft":
                os.dup(0)
        except OSError:
            pass
        return f"{place} is empty, says {os.getpid()}"
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes hosts of Room, or with other fields of the config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "room.py").write_text(textwrap.dedent(ROOM))
    made = []

    def make(num_processes: int = 4, **fields) -> EnvironmentHost:
        config = EnvironmentConfig(**({"name": "room.py:Room"} | fields))
        made.append(EnvironmentHost(config, "hermes", num_processes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def room(host) -> EnvironmentHost:
    """A host of Room, where episode 0 has begun."""
    room = host()
    say(room, 0, "reset", {}, 0, 0)
    return room


def turn(room: EnvironmentHost, text: str, *arguments, seconds: float = 600.0) -> dict:
    """The reply to a turn of episode 0."""
    return say(room, 0, "turn", text, *arguments, seconds=seconds)


def test_an_episode_from_reset_to_reward(host):
    room = host()
    assert say(room, 7, "reset", {"start": 2, "other": "column"}, 5, 1) == {"text": "Room 5, bed 1."}
    reply = say(room, 7, "turn", f"I add. {call('add', number=3)} and {call('add', number=4)}")
    assert reply["answers"] == ["5", "9"] and not reply["ended"]
    reply = say(room, 7, "turn", call("add", number=1) * 3)
    assert reply["answers"] == ["10"] and reply["ended"] and reply["counts"]["calls"] == 1  # none after the end
    assert say(room, 7, "finish") == {"reward": 1.0, "info": {"count": 10}}
    assert say(room, 8, "reset", {}, 6, 0)["text"] == "Room 6, bed 0."  # the process again, with a new object
    assert say(room, 8, "turn", "no call")["ended"]
    assert say(room, 8, "finish")["reward"] == 0.0


def test_half_a_character_is_a_question_mark_wherever_it_comes_from(host, tmp_path):
    """The policy can write one as an escape of JSON; no tokenizer and no file takes it."""
    (tmp_path / "half.py").write_text(
        "class Half:\n"
        "    def reset(self, **row): return 'Begin \\ud83d.'\n"
        "    def search(self, query: str) -> str:\n"
        "        'Search.'\n"
        "        self.query = query\n"
        "        return f'No {query}.'\n"
        "    def reply(self, text): return '\\udc80'\n"
    )
    room = host(name="half.py:Half")
    assert say(room, 0, "reset", {}, 0, 0) == {"text": "Begin ?."}
    text = '<tool_call>{"name": "search", "arguments": {"query": "a \\ud800 \\ud83d\\udc4d"}}</tool_call>'
    assert turn(room, text)["answers"] == ["No a ? 👍."]
    assert turn(room, "no call")["answers"] == ["?"]
    assert say(room, 0, "finish")["info"] == {"query": "a ? 👍"}


ADD = call("add", number=3)
FENCED = '```json\n{"name": "add", "arguments": {"number": 4}}\n```'


@pytest.mark.parametrize(
    ("text", "more", "answers", "ended", "unread"),
    [
        (f"I add. </think> {ADD}", [False, "<think>\n"], ["3"], False, ""),  # the template opened a thought
        (f"I may add. {ADD}", [False, "<think>\n"], [], True, ""),
        (f"{ADD} {FENCED}", [], ["3"], False, ""),
        (FENCED, [], [], True, "fence"),  # in a style that is not read
        (f'{ADD}<tool_call>{{"name": "add"', [False, "", True], ["3"], True, ""),  # cut off, so one call and no `reply`
    ],
)
def test_which_calls_of_a_turn_are_carried_out(room, text, more, answers, ended, unread):
    reply = turn(room, text, *more)
    assert (reply["answers"], reply["ended"], reply.get("unread", "")) == (answers, ended, unread)
    counts = {"calls": len(answers), "bad_calls": 0, "tool_errors": 0, "unread_calls": int(bool(unread))}
    assert reply["counts"] == counts
    assert reply.get("calls", []) == [{"name": "add", "arguments": {"number": 3}}] * len(answers)
    assert say(room, 0, "finish")["info"] == {"count": 3 * len(answers)}


def test_the_reward_so_far_is_asked_for_only_where_turns_earn(host):
    room, text = host(), call("add", number=4)
    say(room, 0, "reset", {}, 0, 0)
    assert "earned" not in turn(room, text)
    assert turn(room, text, True)["earned"] == 0.8
    assert "earned" not in turn(room, text, True)  # its end, which asks by itself
    assert say(room, 0, "finish")["reward"] == 1.2
    for fails, kind, reason in (("nan", "hung", "nan"), ("none", "lost", "None after a turn")):
        say(room, 1, "reset", {"fails": fails}, 0, 0)
        reply = say(room, 1, "turn", text, True)
        assert reply["kind"] == kind and reason in reply["failed"]
    say(room, 2, "reset", {"fails": "none"}, 0, 0)
    assert say(room, 2, "finish")["reward"] is None


def test_what_the_policy_causes_is_told_to_it(room):
    for text in (call("fly"), call("add", number="three"), "<tool_call>{", call("add", number=1).replace("1", "1e999")):
        assert turn(room, text)["counts"]["bad_calls"] == 1
    for what in ("raise", "interrupt"):
        reply = turn(room, call("do", what=what))
        assert len(reply["answers"]) == reply["counts"]["tool_errors"] == 1 and not reply["ended"]
    for what in ("flood", "smile"):
        reply = turn(room, call("do", what=what))
        assert 1000 < len(reply["answers"][0]) < 50_000  # cut before it fills a socket
    assert len(json.dumps("\U0001f600" * MAX_OPENING_CHARACTERS)) < 0.9 * LINE_BYTES  # else the process is ended for it
    assert say(room, 0, "finish")["reward"] == 0.0


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("loop", "hung"),
        ("child loops", "hung"),
        ("eat", "hung"),
        ("sleep", "lost"),
        ("die", "hung"),
        ("killed", "lost"),
        ("net", "lost"),
    ],
)
def test_a_failure_has_its_cause_and_costs_its_own_deadline(room, what, kind):
    say(room, 1, "reset", {}, 0, 0)
    seconds = 5.0 if what in ("loop", "child loops", "sleep") else 600.0
    reply = turn(room, call("do", what=what), seconds=seconds)
    assert reply["kind"] == kind and reply["failed"].startswith("turn: ")
    assert say(room, 1, "turn", call("add", number=1))["answers"] == ["1"]  # the others do not notice
    assert say(room, 2, "reset", {}, 0, 0)["text"]


def test_a_call_that_loops_is_told_from_one_that_waits_where_a_core_has_other_work(room):
    say(room, 1, "reset", {}, 0, 0)
    core = min(os.sched_getaffinity(0))
    for pid in children(room.workers.supervisor.pid):
        os.sched_setaffinity(pid, {core})
    work = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", work]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(12)]
    try:
        for other in others:
            other.stdout.readline()
        kinds = [
            say(room, i, "turn", call("do", what=what), seconds=5.0)["kind"] for i, what in enumerate(("loop", "sleep"))
        ]
    finally:
        for other in others:
            other.kill()
            other.communicate()
    assert kinds == ["hung", "lost"]


def test_a_reset_that_fails_loses_its_episode(host):
    room = host()
    for fails in ("always", "memory", str(MAX_OPENING_CHARACTERS + 1)):  # the policy has done nothing yet
        reply = say(room, 1, "reset", {"fails": fails}, 0, 0)
        assert reply["kind"] == "lost"
    assert f"{MAX_OPENING_CHARACTERS + 1} characters" in reply["failed"]
    text = say(room, 2, "reset", {"fails": str(MAX_OPENING_CHARACTERS)}, 0, 0)["text"]
    assert len(text) == MAX_OPENING_CHARACTERS


@pytest.mark.parametrize(("what", "reason"), [("too much", "get_reward returned inf"), ("broken", "no reward today")])
def test_a_reward_that_the_policy_can_have_broken_is_scored(room, what, reason):
    """Else it could leave out of the loss what it does badly."""
    turn(room, call("do", what=what))
    reply = say(room, 0, "finish")
    assert reply["kind"] == "hung" and reason in reply["failed"]


def test_what_an_episode_detaches_lives_until_its_process_ends(host, tmp_path):
    """As a tmux server does. The end of another episode, and of what that had detached, changes nothing."""
    (tmp_path / "served.py").write_text(
        "import os, signal, subprocess\n"
        "class Served:\n"
        "    def reset(self):\n"
        "        shell = 'sleep 600 > /dev/null 2>&1 & echo $!'\n"
        "        self.server = int(subprocess.run(['setsid', 'sh', '-c', shell], capture_output=True).stdout)\n"
        "        return str(self.server)\n"
        "    def reply(self, text): return str(os.kill(self.server, 0))\n"
        "    def close(self): os.kill(self.server, signal.SIGKILL)\n"
        "    def get_reward(self): return 1.0\n"
    )
    served = host(name="served.py:Served")
    first, _, pid = (say(served, episode, "reset", {}, 0, 0)["text"] for episode in range(3))
    assert say(served, 0, "finish")["reward"] == 1.0
    wait_until(lambda: not alive(int(first)), "it to die")
    say(served, 3, "reset", {}, 0, 0)  # so that the supervisor has looked
    for episode in (1, 2):
        assert say(served, episode, "turn", "well?")["answers"] == ["None"]
    served.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_functions_share_processes_and_a_late_one_is_told(host):
    tools = host(num_processes=1, name="", tools=("room.py:look",))
    for episode in range(3):
        tools.ask(episode, "turn", [call("look", place="cellar")], 600.0)
    replies = []
    while len(replies) < 3:
        replies += tools.poll(600)
    assert len({reply["answers"][0] for reply in replies}) == 1  # of one process
    late = say(tools, 0, "turn", call("look", place="attic"), seconds=1.0)
    assert "longer than 1 s" in late["answers"][0] and not late["ended"] and late["counts"]["hung_calls"] == 1
    pids = [say(tools, 0, "turn", call("look", place="shaft"))["answers"][0].split()[-1] for _ in range(2)]
    assert pids[0] != pids[1]  # each has used up its descriptors


def write(tmp_path, code: str) -> str:
    (tmp_path / "other.py").write_text(textwrap.dedent(code))
    return "other.py:Other"


def test_each_process_draws_its_own_numbers(host, tmp_path):
    """Forks begin with the generators of the process that imported the file. One that does not load is refused."""
    with pytest.raises(ValueError, match="no_such_library"):
        host(name=write(tmp_path, "import no_such_library"))
    made = host(
        name=write(
            tmp_path,
            """
            import random
            import numpy.random
            numpy.random.rand()
            class Other:
                def reset(self): return f"{random.random()} {numpy.random.rand()}"
                def reply(self, text): return None
            """,
        )
    )
    texts = [say(made, episode, "reset", {}, 0, 0)["text"] for episode in range(3)]
    assert all(len(set(numbers)) == 3 for numbers in zip(*map(str.split, texts), strict=True)), texts


def test_what_a_file_starts_as_it_is_imported_goes_on(host, tmp_path):
    code = """
        import pathlib, subprocess
        helper = subprocess.Popen(["sleep", "1000"])
        class Other:
            def reset(self): return str(helper.pid)
            def reply(self, text): return None
    """
    made = host(name=write(tmp_path, code))
    for _ in range(2):  # between two episodes nothing is at work
        helper = say(made, 0, "reset", {}, 0, 0)["text"]
        assert alive(int(helper))
        say(made, 0, "finish")
    made.close()
    assert not alive(int(helper))


def test_close_is_called_after_a_failure_and_its_own_costs_nothing(host, tmp_path):
    code = """
        import pathlib
        class Other:
            def reset(self, fails: str = ""):
                self.fails = fails
                if fails == "reset": raise ValueError("no")
            def reply(self, text):
                if self.fails == "reply": raise ValueError("no")
                return "Go on."
            def get_reward(self):
                if self.fails == "reward": raise ValueError("no")
                return 0.5
            def close(self):
                with open("closed", "a") as file: print(self.fails, file=file)
                raise RuntimeError("it is gone already")
    """
    made = host(name=write(tmp_path, code))
    say(made, 0, "reset", {}, 0, 0)
    assert say(made, 0, "finish")["reward"] == 0.5
    assert say(made, 0, "reset", {"fails": "reset"}, 0, 0)["kind"] == "lost"
    for fails, do in (("reply", "turn"), ("reward", "finish")):
        say(made, 0, "reset", {"fails": fails}, 0, 0)
        reply = say(made, 0, do, *["Hm."] * (do == "turn"))
        assert reply["kind"] == "hung" and "ValueError: no" in reply["failed"]
    assert (tmp_path / "closed").read_text().split("\n") == ["", "reset", "reply", "reward", ""]


def test_what_an_async_class_left_running_goes_on_between_two_calls(host, tmp_path):
    """As a client of a websocket must answer pings while the policy writes. Signals are handled as ever."""
    code = """
        import asyncio, pathlib, signal
        class Other:
            async def reset(self):
                self.task = asyncio.create_task(self._beat())
            async def _beat(self):
                while True:
                    with open("beats", "a") as file: file.write(".")
                    await asyncio.sleep(0.01)
            async def _leave(self):
                await asyncio.sleep(0.01)
                pathlib.Path("left").touch()
                raise SystemExit(4)
            async def reply(self, text):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                if text == "leave": self.other = asyncio.create_task(self._leave())
                return "Go on."
    """
    made = host(name=write(tmp_path, code))
    say(made, 0, "reset", {}, 0, 0)

    def wait_for_beats() -> None:
        beats = tmp_path / "beats"
        wanted = beats.stat().st_size + 5
        wait_until(lambda: beats.stat().st_size >= wanted, "it to go on")

    wait_for_beats()
    say(made, 0, "turn", "leave")
    wait_until((tmp_path / "left").exists, "it to leave")  # SystemExit ends no process, but the waiting in the loop
    assert say(made, 0, "turn", "")["answers"] == ["Go on."]
    wait_for_beats()


class Echo(socketserver.BaseRequestHandler):
    """Sends back what comes."""

    def handle(self) -> None:
        while data := self.request.recv(10):
            self.request.sendall(data)


def test_a_client_that_an_episode_leaves_open_takes_nothing_from_a_later_one(host, tmp_path):
    """As openai's do: freed during a later call, it closed itself by the number that a new socket then had."""
    code = """
        import asyncio, gc

        gc.disable()  # it would free the client at a time of its own
        may_close = asyncio.Event()
        closing = []

        class Client:
            async def open(self, port):
                loop = asyncio.get_running_loop()
                self.transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
                self.transport.pause_reading()
                self.itself = self

            def __del__(self):
                try:
                    closing.append(asyncio.get_running_loop().create_task(self.close()))
                except RuntimeError:
                    pass

            async def close(self):
                await may_close.wait()
                self.transport.close()

        class Other:
            async def reset(self, port: int):
                self.client, self.port = Client(), port
                await self.client.open(port)

            async def reply(self, text):
                gc.collect()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                may_close.set()
                await asyncio.gather(*closing)
                writer.write(text.encode())
                return (await reader.read(10)).decode()
    """
    made = host(name=write(tmp_path, code), num_processes=1)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        for episode in range(3):
            say(made, episode, "reset", {"port": port}, 0, 0)
            assert say(made, episode, "turn", "Hello.")["answers"] == ["Hello."]
            say(made, episode, "finish")
        server.shutdown()
