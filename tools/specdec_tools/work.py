"""How `spec-decode bench` divides prompts: into batches, or the same prompts under several loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import click
from attrs import frozen

from specdec_tools.files import TitledPrompt
from specdec_tools.loads import Load, Rate, Users

MOST_REQUESTS = 1_000_000
"""They are in memory."""


@frozen
class Part:
    """Prompts that are measured together: a batch, or all of them under a load.

    row: name of the row that reports it: the prompts' group, or the load.
    """

    row: str
    prompts: Sequence[TitledPrompt]
    load: Load | None = None

    @property
    def title(self) -> str:
        first, last = self.prompts[0].title, self.prompts[-1].title
        return self.row if self.load is not None else first if len(self.prompts) == 1 else f"{first} to {last}"


@frozen
class Work:
    """What is measured, in parts.

    how: how the requests are submitted, in words.
    settings: the same for the JSON.
    seats: most requests that run at once; None: as many as the engine takes.
    """

    parts: Sequence[Part]
    how: str
    settings: dict[str, Any]
    seats: int | None

    @property
    def is_load(self) -> bool:
        return self.parts[0].load is not None

    @classmethod
    def of(
        cls,
        prompts: Sequence[TitledPrompt],
        batch_size: int | None,
        concurrency: tuple[int, ...] | None,
        request_rate: tuple[float, ...] | None,
        num_requests: int | None,
        seed: int,
    ) -> Work:
        """Divide the prompts. Raises click.UsageError if two of batch_size, concurrency and request_rate are given."""
        options = {"--batch-size": batch_size, "--concurrency": concurrency, "--request-rate": request_rate}
        given = [name for name, value in options.items() if value is not None]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)} are different ways of submitting requests: give one of them")
        if concurrency is None and request_rate is None:
            if num_requests is not None:
                raise click.UsageError("--num-requests is for --concurrency and --request-rate: give one of these, too")
            size = batch_size or 1
            parts = [Part(batch[0].group, batch) for batch in _batches(prompts, size)]
            return cls(parts, f"batches of {size}", {"batch_size": size}, max(len(part.prompts) for part in parts))
        least = 2 * max(concurrency) if concurrency is not None else 0
        number = num_requests or max(len(prompts), least)
        if number > MOST_REQUESTS:
            raise click.UsageError(f"{number} requests are more than the {MOST_REQUESTS} that are allowed: give fewer")
        served = list(islice(cycle(prompts), number))
        loads: list[Load] = [Users(each) for each in concurrency or ()]
        loads += [Rate(each, number, seed) for each in request_rate or ()]
        how = f"{number} requests, {', '.join(load.title for load in loads)}"
        settings = {"concurrency": concurrency, "request_rate": request_rate, "num_requests": number}
        seats = max(concurrency) if concurrency is not None else None
        return cls([Part(load.title, served, load) for load in loads], how, settings, seats)


def _batches(prompts: Sequence[TitledPrompt], batch_size: int) -> Iterator[Sequence[TitledPrompt]]:
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.group == group]
        for start in range(0, len(members), batch_size):
            yield members[start : start + batch_size]
