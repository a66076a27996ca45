"""The server's own options; those of the engine are the keywords of `AsyncLLM`."""

from __future__ import annotations

from attrs import frozen

STREAM_INTERVAL_S = 0.016
"""Most screens show sixty pictures per second, and so no more chunks. The steps of small models are shorter, and take
less time than chunks for all of their requests."""


@frozen(kw_only=True)
class Settings:
    """How the server answers.

    model_names: the names by which requests may call the model. Answers, metrics and lists have the first.
    api_keys: requests must name one of these as bearer token. Empty: no key is needed.
    allowed_origins: the origins whose websites may call the server (CORS). Empty: none.
    max_body_bytes: the largest body of a request.
    max_prompt_tokens: the longest prompt; None: what the engine's max_model_len leaves room for.
    max_queued: the most completions that wait while max_num_seqs others run. The next ones are refused with 429.
    request_timeout_s: the most seconds from a request's arrival to the end of its answer; None: any time.
    stream_interval_s: the fewest seconds between two chunks of a streamed completion. 0: a chunk for each step.
    step_timeout_s: the most seconds of an engine's step. After that, the engine counts as hanging. 0: any time; None:
        30, or ten times as long as the longest step is expected to take.
    drain_timeout_s: the most seconds that requests may take after SIGTERM. Those that are left then fail.
    chat_template: a Jinja template to use instead of the tokenizer's; None: the tokenizer's.
    trust_request_chat_template: whether requests may have a chat_template of their own.
    tool_call_parser: the format of tool calls in outputs, a key of `tool_parsers.PARSERS`; None: the one that the chat
        template shows.
    access_log: whether each request is logged in a line of JSON.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    max_queued: int = 1000
    request_timeout_s: float | None = None
    stream_interval_s: float = STREAM_INTERVAL_S
    step_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    access_log: bool = False
