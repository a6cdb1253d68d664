"""Agents for the tests of whole runs. None of them knows that it is trained."""

import http.client
import json
import urllib.parse

import openai


def branches(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Ask two things behind the same answer, then something else. Earns the digits of the answers.

    A last request is left behind, whose answer nobody reads.
    """
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    question = {"role": "user", "content": row["question"]}

    def ask(*messages: dict) -> str:
        return client.chat.completions.create(model=model, messages=[*messages]).choices[0].message.content

    first = ask(question)
    history = [question, {"role": "assistant", "content": first}]
    texts = [first]
    for text in ("3", "4"):
        texts.append(ask(*history, {"role": "user", "content": text}))
    texts.append(ask({"role": "user", "content": "7"}))
    url = urllib.parse.urlsplit(base_url)
    left = http.client.HTTPConnection(url.netloc)
    body = json.dumps({"messages": [question]})
    left.request("POST", f"{url.path}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
    return sum(letter.isdigit() for text in texts for letter in text) / 20
