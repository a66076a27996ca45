"""Turns prompts and conversations into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from transformers import AutoTokenizer

from specdec_core.api.content_parts import with_readable_content
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import check_text, refuse_unknown, shown
from specdec_core.errors import ConfigError, reason
from specdec_core.models.embedded import resolve_model
from specdec_core.models.hub import require
from specdec_core.models.load import refuse_revision

Prompt = str | Mapping[str, Any]
"""Text, {"prompt": str} or {"prompt_token_ids": [int, ...]}; a mapping may have a "cache_salt", too."""

Prompts = Prompt | Sequence[Prompt]

PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
"""The keys that a prompt may have if it is a mapping. It has exactly one of prompt and prompt_token_ids."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": str, "content": str} and whatever else the chat template reads. A content may also be a list
of text parts."""

Conversations = Messages | Sequence[Messages]


@frozen
class TokenizedPrompt:
    """A prompt as token ids. The engine checks later that they are in the vocabulary.

    text: the prompt's text; None if the caller gave token ids.
    cache_salt: prompts share cached keys and values only if their salts are equal.
    """

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str = ""


class PromptReader:
    """Tokenizes prompts with the model's tokenizer. If the tokenizer is None, prompts must be token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def read(self, prompts: Prompts, *, add_special_tokens: bool = True) -> list[TokenizedPrompt]:
        """Tokenize one prompt or several. Raises ConfigError for the first that is not a valid prompt."""
        listed = [prompts] if isinstance(prompts, str | Mapping) else prompts
        if not isinstance(listed, Sequence) or isinstance(listed, bytes):
            raise ConfigError(f"prompts={shown(prompts)} is not understood: give one prompt, or a list of them")
        return [self._read_one(prompt, add_special_tokens=add_special_tokens) for prompt in listed]

    def read_chats(
        self, messages: Conversations, arguments: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> list[TokenizedPrompt]:
        """Turn one conversation or several into prompts with the chat template, and tokenize them. Raises ConfigError.

        arguments: keyword arguments of transformers' apply_chat_template.
        variables: additional inputs of the template, as the user gave them.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ConfigError(f"messages={shown(messages)} is not understood: give one conversation, or a list of them")
        chats: Any = [messages] if isinstance(messages[0], Mapping) else messages
        if not isinstance(variables, Mapping):
            raise ConfigError(f"chat_template_kwargs={shown(variables)} must be a dict of what the template reads")
        clashing = sorted({*variables} & {*arguments, "tokenize", "conversation"})
        if clashing:
            raise ConfigError(f"chat_template_kwargs names {', '.join(clashing)}: that is an argument of chat itself")
        return [self._read_chat(chat, {**arguments, **variables}) for chat in chats]

    def _read_one(self, prompt: Prompt, *, add_special_tokens: bool) -> TokenizedPrompt:
        given: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if isinstance(given, Mapping):
            refuse_unknown(given, PROMPT_KEYS, "a prompt")
        rest = {key: value for key, value in given.items() if key != "cache_salt"} if isinstance(given, Mapping) else {}
        if len(rest) != 1 or not isinstance(rest.get("prompt", ""), str):
            raise ConfigError(
                f"prompt {shown(prompt)} is not understood: give a string, {{'prompt': str}} or "
                f"{{'prompt_token_ids': [int, ...]}}"
            )
        salt = given.get("cache_salt", "")
        if not isinstance(salt, str):
            raise ConfigError(f"cache_salt={shown(salt)} of a prompt must be text")
        if "prompt_token_ids" in rest:
            return TokenizedPrompt(None, rest["prompt_token_ids"], salt)
        return evolve(self._tokenize(rest["prompt"], add_special_tokens=add_special_tokens), cache_salt=salt)

    def _read_chat(self, chat: Messages, arguments: Mapping[str, Any]) -> TokenizedPrompt:
        is_chat = isinstance(chat, Sequence) and all(isinstance(each, Mapping) for each in chat)
        if not is_chat or not chat or not all(isinstance(each.get("role"), str) for each in chat):
            raise ConfigError(
                f"messages {shown(chat)} are not a conversation: give a list of {{'role': ..., 'content': ...}}"
            )
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True left out the tokenizer, and with it the chat template")
        if not getattr(self.tokenizer, "chat_template", None) and not arguments["chat_template"]:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template: pass chat_template=..., a Jinja "
                f"template, or write the prompt yourself and use generate"
            )

        def render(messages: Messages, **changed: Any) -> str:
            found: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **{**arguments, **changed})
            return found

        # A final message that is to be continued would be cut within a part.
        messages = with_readable_content(chat, partial(render, continue_final_message=False))
        try:
            text = render(messages)
        except Exception as error:  # a template is a program, and may raise anything
            raise ConfigError(
                f"the chat template does not accept these messages or arguments: {type(error).__name__}: {error}"
            ) from error
        return self._tokenize(text, add_special_tokens=False)  # a template writes them itself, the first one too

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> TokenizedPrompt:
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True left out the tokenizer: give {'prompt_token_ids': [...]}")
        check_text(text, f"prompt {shown(text, 40)}")
        # verbose: that a text is longer than the model's context is told better once the request is checked
        found = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        token_ids: list[int] = found.input_ids
        if not token_ids:
            raise ConfigError(f"prompt {shown(text)} has no tokens: give at least one character")
        return TokenizedPrompt(text, token_ids)


def load_tokenizer(config: EngineConfig, name: str | Path | None = None) -> Any:
    """Load a tokenizer with transformers. Raises ConfigError.

    name: a folder or a name on the model hub. None: the model's own tokenizer.
    """
    found = resolve_model(name or config.model)
    refuse_revision(found, "tokenizer", "tokenizer_revision", config.tokenizer_revision)
    revisions = {
        "revision": config.tokenizer_revision or (config.revision if name is None else None),
        "code_revision": config.code_revision,
    }
    try:
        require(found, "tokenizer_config.json", "config.json", revision=revisions["revision"])
        return AutoTokenizer.from_pretrained(
            found,
            trust_remote_code=config.trust_remote_code,
            use_fast=config.tokenizer_mode == "auto",
            **{key: value for key, value in revisions.items() if value is not None},
        )
    except Exception as error:  # a broken file may raise anything
        raise ConfigError(
            f"the tokenizer of {found!r} cannot be loaded: {reason(error)}. Name another with tokenizer=..., or pass "
            f"skip_tokenizer_init=True and give prompts as token ids"
        ) from error
