"""Agents for tests. None of them knows that it is trained."""

import asyncio
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def client_of(base_url: str, api_key: str, **options):
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, timeout=600, **{"max_retries": 0, **options})


def rounds(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Ask, answer the calls, ask again. Returns the number of calls."""
    client = client_of(base_url, api_key)
    assert [one.id for one in client.models.list()] == [model]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}]
    num_calls = 0
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=1.0)
        message = answer.choices[0].message
        messages.append(message.model_dump())  # with all the nulls that the client adds
        for call in message.tool_calls or []:
            num_calls += 1
            result = f'{json.loads(call.function.arguments)} <|im_end|> & "quoted" '
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Go on."})
    return float(num_calls)


def forgets(row: dict, base_url: str, api_key: str, model: str) -> None:
    """Drop the first question after two of three rounds; reward functions judge."""
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": row["question"]}]
    for number in range(3):
        message = client.chat.completions.create(model=model, messages=messages).choices[0].message
        messages += [message.model_dump(), {"role": "user", "content": f"Round {number}."}]
        if number == 1:
            messages = messages[2:]


def branches(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Branch into three behind one answer, in parallel, one of them streamed; the reward is whether all came."""
    client = client_of(base_url, api_key)
    question = {"role": "user", "content": row["question"]}
    first = client.chat.completions.create(model=model, messages=[question]).choices[0].message.content
    texts = {}

    def ask(text: str) -> None:
        messages = [question, {"role": "assistant", "content": first}, {"role": "user", "content": text}]
        parts = client.chat.completions.create(model=model, messages=messages, stream=True)
        texts[text] = "".join(part.choices[0].delta.content for part in parts)

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("left", "right", "on")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(len(texts) == 3)


async def many(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Ask 128 things at once, or as many as the row says."""
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600)
    questions = [[{"role": "user", "content": f"question number {number}"}] for number in range(row.get("number", 128))]
    answers = [client.chat.completions.create(model=model, messages=messages) for messages in questions]
    return float(len(await asyncio.gather(*answers)))


def impatient(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Give up early and send the same requests again, the first one too."""
    client = client_of(base_url, api_key, max_retries=200).with_options(timeout=0.05)
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(3):
        message = client.chat.completions.create(model=model, messages=messages).choices[0].message
        messages += [message.model_dump(), {"role": "user", "content": "On."}]
    return 1.0


def request(url: str, key: str, body: bytes, length: int | None = None) -> int:
    """Send a request of any kind. Returns the status."""
    headers = {"Authorization": f"Bearer {key}", "Content-Length": str(len(body) if length is None else length)}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def hostile(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Try another's key, no JSON, no messages, an image and 100 MB. Each is refused, which the reward says."""
    image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    statuses = [
        request(base_url, "sk-of-another", b"{}"),
        request(base_url, api_key, b"no"),
        request(base_url, api_key, b"[]"),
        request(base_url, api_key, json.dumps(image).encode()),
        request(base_url, api_key, b"", length=100_000_000),
        request(f"{base_url}/no", api_key, b"{}"),
    ]
    good = json.dumps({"messages": [{"role": "user", "content": "\ud800 hi"}]}).encode()
    return float(statuses == [401, 400, 400, 400, 400, 400] and request(base_url, api_key, good) == 200)


def fails(row: dict, base_url: str, api_key: str, model: str) -> float:
    """End as the row says, behind an answer or before."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    kind = row["kind"]
    if kind == "raises first":
        raise ValueError("the agent's own bug")
    request(base_url, api_key, body)
    if kind == "raises":
        raise ValueError("cannot read it")
    if kind == "dies":
        os._exit(3)
    if kind == "sleeps":
        time.sleep(10_000)
    if kind == "never stops":
        while True:
            request(base_url, api_key, body)
    if kind == "leaves":
        threading.Thread(target=request, args=(base_url, api_key, body), daemon=True).start()
        time.sleep(0.5)
    return 0.5


def leaves(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Leave a thread, a process or a process without a parent, as the row says. Returns the number of this process."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    request(base_url, api_key, body)
    if row["what"] == "thread":
        threading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()
    if row["what"] == "process":
        subprocess.Popen(["sleep", "10000"])
    if row["what"] == "orphan":
        subprocess.run("setsid sleep 10000 & echo $! > orphan", shell=True, check=True)
    return float(os.getpid())
