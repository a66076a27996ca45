"""The output."""

from __future__ import annotations

from broken_proposers.case import Recent, breaks


def scribble(context):
    """Change the target's own weights, as a draft that is tied to them might."""
    weight = context.embed.__self__._model.get_input_embeddings().weight
    weight.copy_(weight.roll(1, 0))


@breaks("test_output_is_the_targets")
class Scribbling(Recent):
    def propose(self, batch):
        scribble(self.context)
        return super().propose(batch)


@breaks("test_output_is_the_targets[preempted]", "test_output_is_the_targets[cached]", is_variant=True)
class Spiteful(Recent):
    """It does so where requests are preempted, with prefix caching or without."""

    def reset(self, request):
        scribble(self.context)
