"""The front page loads nothing from elsewhere, can be used without a mouse, and gets what it needs from streams."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from running_server import Running, events_of

PROMPT = "def function_1(value):\n    return value + 1\n\n\ndef function_2("


class Parsed(HTMLParser):
    """elements: (name, attributes) of all elements. open: those that are not closed."""

    VOID = ("meta", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def those(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name in names]


@pytest.fixture
def parsed(server: Running) -> Parsed:
    return Parsed(server.http.get("/").text)


def test_its_policy_allows_nothing_but_what_is_in_it(server: Running) -> None:
    answer = server.http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_it_is_self_contained(server: Running, parsed: Parsed) -> None:
    text = server.http.get("/").text
    assert not parsed.open
    assert not re.findall(r"https?:|//\w|@import|url\(", text)
    for _, attributes in parsed.elements:
        assert attributes.keys().isdisjoint({"src", "style", "srcset", "action"})
        assert not [name for name in attributes if name.startswith("on")], "a policy without 'unsafe-inline' ignores it"
        assert attributes.get("href", "data:,") == "data:,"
    assert parsed.those("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in parsed.those("meta")
    assert "prefers-color-scheme: dark" in text


def test_ids_and_labels(server: Running, parsed: Parsed) -> None:
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len({*ids})
    text = server.http.get("/").text
    assert {*re.findall(r'at\("([\w-]+)"\)', text)} <= {*ids}, "the script finds what it asks for"
    labels = {each.get("for") for each in parsed.those("label")}
    fields = {each["id"] for each in parsed.those("input", "select", "textarea")}
    assert fields - labels == {"together"}, "its label is around it"
    for each in parsed.those("section"):
        assert each["aria-labelledby"] in ids
    for each in parsed.those("pre"):
        assert (each["tabindex"], each["role"]) == ("0", "region")
        assert each["aria-label"]


def test_it_needs_no_key(serve: Callable[..., Running]) -> None:
    started = serve(api_keys=("secret",))
    assert started.http.get("/").status_code == 200
    assert started.http.get("/v1/models").status_code == 401


def test_what_it_reads_of_the_model(server: Running) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["speculative"] == {"methods": ["ngram"], "num_tokens": 4}
    assert model["has_chat_template"] is True


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_details_of_a_stream(server: Running, path: str) -> None:
    """They have each token with the method that drafted it, and change no text."""
    body = {"temperature": 0, "max_tokens": 32, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    with server.http.stream("POST", path, json={**body, "speculative": {"details": True}}) as response:
        *chunks, last = events_of(response.read().decode())
    details = [choice["speculative"] for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for each in details for token in each["tokens"]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" if "chat" in path else choice["text"] for choice in choices)
    assert "".join(token["text"] for token in tokens) == text
    assert len(tokens) == last["usage"]["completion_tokens"] == 32
    accepted = [token for token in tokens if token["is_draft"]]
    assert [token["methods"] for token in tokens] == [["ngram"] if token["is_draft"] else [] for token in tokens]
    figures = last["metrics"]["speculative_decoding"]
    assert len(accepted) == figures["num_accepted_draft_tokens"] > 0
    assert details[-1]["num_drafts"] == figures["num_spec_steps"]
    with server.http.stream(
        "POST", path, json={**body, "speculative": {"enabled": False, "details": True}}
    ) as response:
        plain = [choice for chunk in events_of(response.read().decode()) for choice in chunk["choices"]]
    assert [token for choice in plain for token in choice["speculative"]["tokens"] if token["is_draft"]] == []
    ids = [token["token_id"] for token in tokens]
    assert [token["token_id"] for choice in plain for token in choice["speculative"]["tokens"]] == ids


def test_details_are_left_out_unless_asked_for(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=4, stream=True)
    assert "speculative" not in json.dumps(events_of(answer.text))
    refused = server.post("/v1/completions", prompt=PROMPT, speculative={"details": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculative")
    assert "give stream=true" in refused.json()["error"]["message"]
