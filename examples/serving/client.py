"""Asks a server of `spec-decode serve` with the openai package: whole answers, streams, figures of speculation, tools.

python client.py [http://127.0.0.1:8000/v1] [KEY]
"""

from __future__ import annotations

import builtins
import json
import sys
from typing import Any

from openai import OpenAI

MESSAGES: Any = [{"role": "user", "content": "def mean(values):\n    return sum(values) / len(values)\n\n\ndef mean("}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a function's documentation up.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
]


def look_up(name: str) -> str:
    if not hasattr(builtins, name):
        return "There is no such function."
    return getattr(builtins, name).__doc__ or "There is no documentation."


def chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32, temperature=0)
    print(answer.choices[0].message.content)
    print(answer.usage)


def stream(client: OpenAI, model: str) -> None:
    """Print an answer as it comes, with [] around accepted draft tokens, and then how many tokens were drafted."""
    chunks = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculative": {"details": True}},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            for token in choice.speculative["tokens"]:
                print(f"[{token['text']}]" if token["is_draft"] else token["text"], end="", flush=True)
        if not chunk.choices:
            print(f"\n{json.dumps(chunk.metrics)}")


def plain(client: OpenAI, model: str) -> None:
    """The same answer without drafts. At temperature 0, and with a seed, it is the same text."""
    body = {"speculative": {"enabled": False}}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=32, temperature=0, extra_body=body
    )
    print(answer.choices[0].message.content)


def call_tools(client: OpenAI, model: str) -> None:
    """Let the model call functions until it answers. It needs a chat template with tools."""
    messages = [*MESSAGES, {"role": "user", "content": "What does sorted do?"}]
    for _ in range(3):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=64, temperature=0
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            print(f"{call.function.name}({call.function.arguments})")
            found = look_up(**json.loads(call.function.arguments)) if call.function.name == "look_up" else "unknown"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    print(message.content)


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none") -> None:
    with OpenAI(base_url=url, api_key=key) as client:
        served = client.models.list().data[0]
        print(f"{served.id} drafts with {served.speculative['methods']}")
        chat(client, served.id)
        if served.speculative["methods"]:
            stream(client, served.id)
        plain(client, served.id)
        call_tools(client, served.id)


if __name__ == "__main__":
    main(*sys.argv[1:])
