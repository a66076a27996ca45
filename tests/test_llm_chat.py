"""Conversations through a chat template, and the errors for those that the template or LLM refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, SamplingParams
from specdec_core.api import content_parts

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}{% if shout %}!!{% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHAT = [{"role": "user", "content": "sort a list"}]
RENDERED = "<|endoftext|>[user] sort a list\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An LLM of the embedded model with a changed tokenizer, which has a chat template and begins every text with a
    special token."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from specdec_model_tiny import model_path

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return LLM("tiny", tokenizer=folder, dtype="float32", max_model_len=256)


def test_one_conversation(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY)
    assert output.prompt == f"{RENDERED}[assistant] "
    assert output.outputs == llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY)[0].outputs


def test_the_template_begins_the_text_and_the_tokenizer_does_not_again(llm: LLM) -> None:
    bos = llm._session.prompts.tokenizer.bos_token_id
    assert llm.generate("text", GREEDY)[0].prompt_token_ids[0] == bos, "with generate, the tokenizer does"
    token_ids = llm.chat(CHAT, GREEDY)[0].prompt_token_ids
    assert token_ids[0] == bos
    assert token_ids.count(bos) == 1


def test_several_conversations_with_parameters_of_their_own(llm: LLM) -> None:
    chats = [CHAT, [*CHAT, {"role": "assistant", "content": "sorted(x)"}, {"role": "user", "content": "reverse it"}]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    outputs = llm.chat(chats, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert outputs[1].prompt == f"{RENDERED}[assistant] sorted(x)\n[user] reverse it\n[assistant] "


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ({"add_generation_prompt": False}, RENDERED),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, f"{RENDERED}tools: 1\n[assistant] "),
        ({"chat_template_kwargs": {"shout": True}}, f"{RENDERED}!![assistant] "),
        ({"chat_template": "{{ messages[0].content }}"}, "sort a list"),
        ({"add_generation_prompt": False, "continue_final_message": True}, RENDERED.rstrip("\n")),
    ],
    ids=str,
)
def test_arguments_of_the_template(llm: LLM, arguments: dict[str, Any], prompt: str) -> None:
    assert llm.chat(CHAT, GREEDY, **arguments)[0].prompt == prompt


def test_streamed(llm: LLM) -> None:
    (whole,) = llm.chat(CHAT, GREEDY)
    parts = list(llm.chat(CHAT, GREEDY, stream=True))
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert parts[-1].finish_reason == whole.outputs[0].finish_reason


PRINTING = {
    "prints": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "trims": "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}",
    "writes JSON": "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}",
    "concatenates": "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}",
    "drops lists": "{% for m in messages %}{% if m.content is string %}{{ m.content }}!{% endif %}{% endfor %}",
    "prints items": "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}",
}
READING = {
    "a loop": "{% for m in messages %}{% for p in m.content %}<{{ p.type }} {{ p.text }}>{% endfor %}{% endfor %}",
    "a macro": "{% macro parts(c) %}{% for p in c %}<{{ p['type'] }} {{ p['text'] }}>{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ parts(m.content) }}{% endfor %}",
    "a filter": "{% for m in messages %}<text {{ m.content | map(attribute='text') | join('><text ') }}>{% endfor %}",
}
PARTS = [{"type": "text", "text": "sort"}, {"type": "text", "text": "a list"}]
BEFORE = {"role": "system", "content": "be brief"}


def prompt_of(llm: LLM, content: Any, template: str, **arguments: Any) -> str | None:
    """Return the prompt of a conversation whose last message has this content."""
    chat = [BEFORE, {"role": "user", "content": content}]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    return llm.chat(chat, one, chat_template=template, use_tqdm=False, **arguments)[0].prompt


def check_joined(llm: LLM, template: str) -> None:
    assert prompt_of(llm, [{"type": "text", "text": "hi"}], template) == prompt_of(llm, "hi", template)
    assert prompt_of(llm, ["hi"], template) == prompt_of(llm, "hi", template)
    assert prompt_of(llm, PARTS, template) == prompt_of(llm, "sort\na list", template)


def check_handed_on(llm: LLM, template: str) -> None:
    found = prompt_of(llm, PARTS, "{% set messages = messages[1:] %}" + template)
    assert found == "<text sort><text a list>"


@pytest.mark.parametrize("template", PRINTING)
def test_content_parts_become_text_for_templates_that_print_content(llm: LLM, template: str) -> None:
    check_joined(llm, PRINTING[template])


@pytest.mark.parametrize("template", READING)
def test_content_parts_are_handed_on_to_templates_that_read_them(llm: LLM, template: str) -> None:
    check_handed_on(llm, READING[template])


def test_content_parts_that_take_the_wrong_way_are_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_parts, "_read_as_parts", lambda chat, parts, render: set(parts))
    for template in PRINTING.values():
        with pytest.raises((AssertionError, ConfigError)):
            check_joined(llm, template)
    monkeypatch.setattr(content_parts, "_read_as_parts", lambda chat, parts, render: set())
    for template in READING.values():
        with pytest.raises(AssertionError):
            check_handed_on(llm, template)


def test_each_message_has_the_content_that_the_template_reads_there(llm: LLM) -> None:
    """As in Llama 3.2 with images, whose template prints the system message and iterates over the others."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% elif m.content is string %}"
        "({{ m.content }}){% else %}{% for p in m.content %}<{{ p.text }}{{ p.mark }}>{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    system = {"role": "system", "content": [{"type": "text", "text": "be"}, {"text": "brief"}]}
    marked = {"role": "user", "content": [{"type": "text", "text": "sort", "mark": "!"}, "a list"]}
    (output,) = llm.chat([system, CHAT[0], marked], GREEDY, chat_template=template)
    assert output.prompt == "be\nbrief(sort a list)<sort!><a list>"
    assert marked["content"] == [{"type": "text", "text": "sort", "mark": "!"}, "a list"], (
        "the caller's stay as they are"
    )


@pytest.mark.parametrize("template", [PRINTING["prints"], READING["a loop"]])
def test_content_parts_of_a_message_to_be_continued(llm: LLM, template: str) -> None:
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    whole = prompt_of(llm, PARTS, "{% set messages = messages[1:] %}" + template)
    found = prompt_of(llm, PARTS, "{% set messages = messages[1:] %}" + template, **arguments)
    assert found == (whole or "").rstrip(">")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [*PARTS, {"type": "image_url", "image_url": {"url": "x"}}],
            r"content\[2\] of messages\[0\] is of type 'image_url'",
        ),
        ([{"image": "x"}], r"content\[0\] .* has text=None: give a string"),
        ([{"type": "text", "text": 5}], "has text=5: give a string"),
        ([5], "is of type int: models here read text only"),
        ([{"type": None, "text": "hi"}], "is of type None"),
    ],
    ids=str,
)
def test_content_parts_that_are_no_text(llm: LLM, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.chat([{"role": "user", "content": content}], GREEDY)


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([], {}, "messages="),
        ("hello", {}, "messages='hello'"),
        ([[]], {}, "not a conversation"),
        ([{"content": "no role"}], {}, "not a conversation"),
        ([CHAT, "hello"], {}, "not a conversation"),
        ([*CHAT, CHAT], {}, "not a conversation"),
        (CHAT, {"continue_final_message": True}, "not compatible"),
        (CHAT, {"chat_template": "{% for %}"}, "TemplateSyntaxError"),
        (CHAT, {"chat_template": "{{ raise_exception('roles must alternate') }}"}, "roles must alternate"),
        (CHAT, {"chat_template": "{# empty #}"}, "has no tokens"),
        (CHAT, {"chat_template_kwargs": ["tone"]}, "must be a dict"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs names tokenize"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs names tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(llm: LLM, messages: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.chat(messages, GREEDY, **arguments)
    assert not llm.engine.has_unfinished


def test_without_a_chat_template() -> None:
    with pytest.raises(ConfigError, match="has no chat template: pass chat_template"):
        LLM("tiny").chat(CHAT)
    with pytest.raises(ConfigError, match="left out the tokenizer"):
        LLM("tiny", skip_tokenizer_init=True).chat(CHAT)
