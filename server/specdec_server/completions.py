"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve

from specdec_core import Piece, StreamOutput, TokenizedPrompt
from specdec_server.completion import Completion, entries
from specdec_server.generation import Answer
from specdec_server.logprobs import completion_logprobs, prompt_logprobs
from specdec_server.protocol import CompletionFields
from specdec_server.service import Service


class CompletionAnswer(Answer):
    """Completions of one or more prompts. The choices of a prompt follow each other, in the order of the prompts."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"
    required = "prompt"
    fields: CompletionFields

    def __init__(self, service: Service, body: Mapping[str, Any]) -> None:
        fields, params = CompletionFields.parse(body)
        self._prompts = fields.prompts
        super().__init__(service, fields, params, len(self._prompts))

    @property
    def texts(self) -> Any:
        return self._prompts

    def read_prompts(self) -> Iterator[TokenizedPrompt]:
        for each in self._prompts:
            if "prompt_token_ids" in each:
                yield TokenizedPrompt(None, each["prompt_token_ids"], each["cache_salt"])
            else:
                yield self.service.llm.tokenize(each, add_special_tokens=self.fields.add_special_tokens)

    def choice(self, completion: Completion) -> dict[str, Any]:
        choice = self._choice(completion, completion.text, is_first=True)
        if self.params.prompt_logprobs is not None and not self.fields.echo:
            choice["prompt_logprobs"] = prompt_logprobs(completion.prompt_logprobs)
        return choice

    def chunk_choice(self, completion: Completion, output: StreamOutput) -> dict[str, Any] | None:
        if not self.is_due(completion, output.text):
            return None
        is_first, completion.is_begun = not completion.is_begun, True
        return self._choice(completion, output.text, is_first=is_first)

    def _choice(self, completion: Completion, text: str, *, is_first: bool) -> dict[str, Any]:
        """An entry of `choices` with this text, and what belongs to the tokens that no earlier entry has.

        is_first: whether the entry is the completion's first one, which has the prompt, too, with echo.
        """
        echoed = self._prompt_text(completion) if self.fields.echo and is_first else ""
        pieces = completion.take_new()
        choice = {**self.entry(completion, pieces), "text": echoed + text}
        if self.params.logprobs is not None:
            choice["logprobs"] = self._logprobs(completion, pieces, is_echoed=self.fields.echo and is_first)
        if self.fields.return_token_ids:
            choice["prompt_token_ids"] = list(completion.prompt.token_ids) if is_first else None
        return choice

    def _logprobs(self, completion: Completion, pieces: Sequence[Piece], *, is_echoed: bool) -> dict[str, Any]:
        """The logprobs of new tokens, after those of the prompt if is_echoed."""
        found = entries(pieces)
        texts = [str(logprobs[token_id].decoded_token) for token_id, logprobs in found if logprobs is not None]
        if is_echoed:
            first = self.completions[completion.number - completion.number % self.params.n]
            prompt = list(zip(completion.prompt.token_ids, first.prompt_logprobs or (), strict=False))
            decode = self.service.llm.get_tokenizer().decode
            found, texts = [*prompt, *found], [*(decode([token_id]) for token_id, _ in prompt), *texts]
        offset = completion.num_characters
        completion.num_characters += sum(map(len, texts))
        return completion_logprobs(found, texts, offset)

    def _prompt_text(self, completion: Completion) -> str:
        text = completion.prompt.text
        if text is None:
            text = str(self.service.llm.get_tokenizer().decode(completion.prompt.token_ids))
            completion.prompt = evolve(completion.prompt, text=text)
        return text
