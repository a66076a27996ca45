"""Faulty proposers that change the engine's output."""

from __future__ import annotations

from broken_proposers.case import Recent, breaks


def scribble(context):
    """Overwrite the target's embedding matrix, as a draft model that shares it might."""
    weight = context.embed.__self__._model.get_input_embeddings().weight
    weight.copy_(weight.roll(1, 0))


@breaks("test_output_is_the_targets")
class Scribbling(Recent):
    def propose(self, batch):
        scribble(self.context)
        return super().propose(batch)


@breaks("test_output_is_the_targets[preempted]", "test_output_is_the_targets[cached]", is_variant=True)
class Spiteful(Recent):
    """Overwrites the target's embedding matrix when a request is preempted, with or without prefix caching."""

    def reset(self, request):
        scribble(self.context)
