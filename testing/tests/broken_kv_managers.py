"""KV managers with a deliberate fault, each with the test of the conformance kit that must fail for it."""

from __future__ import annotations

from broken_proposers import Case

from specdec_core import KVManagerSpec, hookimpl

FAULTS = {}
"""{name: (test, function that makes a faulty class of a sound one)}."""


def breaks(test):
    def register(fault):
        FAULTS[fault.__name__] = test, fault
        return fault

    return register


@breaks("test_caches")
def small(sound):
    class Small(sound):
        def cache(self, group, layer):
            return tuple(cache[:-1] for cache in super().cache(group, layer))

    return Small


@breaks("test_slots_hold_their_tokens")
def sharing(sound):
    """Gives the first request's slots for every request of a batch."""

    class Sharing(sound):
        def metadata(self, request_ids, starts, lengths):
            return super().metadata([request_ids[0]] * len(request_ids), starts, lengths)

    return Sharing


@breaks("test_slots_hold_their_tokens")
def careless(sound):
    """Finds the blocks of other texts."""

    class Careless(sound):
        def admit(self, request_id, token_ids, salt, groups):
            return super().admit(request_id, token_ids * 0, salt, groups)

    return Careless


@breaks("test_compact")
def idle(sound):
    class Idle(sound):
        def compact(self, request_ids, num_known, verdict):
            return

    return Idle


@breaks("test_compact")
def early(sound):
    """Moves nodes one slot too far to the front."""

    class Early(sound):
        def compact(self, request_ids, num_known, verdict):
            super().compact(request_ids, [known - 1 for known in num_known], verdict)

    return Early


@breaks("test_release_gives_all_back")
def leaking(sound):
    class Leaking(sound):
        def release(self, request_id):
            if request_id in self._pool:
                super().release(request_id)
                self._pool.add(f"leak {self._pool.num_free}")
                self._pool.grow(f"leak {self._pool.num_free}", 1)

    return Leaking


@breaks("test_capacity")
def piecemeal(sound):
    """Takes what is free before it notices that this is too little."""

    class Piecemeal(sound):
        def reserve(self, request_id, num_tokens, num_scratch):
            for number in range(1, num_tokens + num_scratch + 1):
                super().reserve(request_id, number, 0)

    return Piecemeal


@breaks("test_admit")
def eager(sound):
    """Finds the last token, too."""

    class Eager(sound):
        def admit(self, request_id, token_ids, salt, groups):
            import numpy as np

            return super().admit(request_id, np.append(token_ids, 0), salt, groups)

    return Eager


@breaks("test_salts_separate")
def unsalted(sound):
    class Unsalted(sound):
        def admit(self, request_id, token_ids, salt, groups):
            return super().admit(request_id, token_ids, "", groups)

    return Unsalted


@breaks("test_tokens_after_a_stop")
def boundless(sound):
    """Publishes blocks behind the request's last token, as if the tokens there were all 1."""

    class Boundless(sound):
        def _publish(self, text, blocks, token_ids, num_final):
            import numpy as np

            padded = np.append(token_ids, np.ones(max(0, num_final - len(token_ids)), dtype=np.int64))
            super()._publish(text, blocks, padded, num_final)

    return Boundless


@breaks("test_draft_groups")
def trusting(sound):
    """Takes the groups of drafts for filled, without `fill`."""

    class Trusting(sound):
        def advance(self, requests, counts):
            for request in requests:
                text = self._texts[request.id]
                text.filled = dict.fromkeys(text.filled, 10**6)
            super().advance(requests, counts)

    return Trusting


@breaks("test_draft_groups")
def shortsighted(sound):
    """Leaves the next tokens out of a block's key."""

    class Shortsighted(sound):
        def add_group(self, layout, owner="target", lookahead=0):
            return super().add_group(layout, owner, 0)

    return Shortsighted


@breaks("test_same_calls_same_answers")
def nosy(sound):
    """Finds something only after metadata was called, which no other rank does."""

    class Nosy(sound):
        num_calls = 0

        def metadata(self, request_ids, starts, lengths):
            self.num_calls += 1
            return super().metadata(request_ids, starts, lengths)

        def admit(self, request_id, token_ids, salt, groups):
            return super().admit(request_id, token_ids if self.num_calls else token_ids[:0], salt, groups)

    return Nosy


@breaks("test_interrupts")
def brittle(sound):
    """Counts free blocks by hand."""

    class Brittle(sound):
        num_taken = 0

        def reserve(self, request_id, num_tokens, num_scratch):
            before = super().num_free_blocks
            super().reserve(request_id, num_tokens, num_scratch)
            self.num_taken += before - super().num_free_blocks

        def advance(self, requests, counts):
            before = super().num_free_blocks
            super().advance(requests, counts)
            self.num_taken += before - super().num_free_blocks

        def release(self, request_id):
            before = super().num_free_blocks
            super().release(request_id)
            self.num_taken += before - super().num_free_blocks

        @property
        def num_free_blocks(self):
            return self._pool.num_blocks - self.num_taken

    return Brittle


@breaks("test_in_the_engine")
def rolling(sound):
    """Moves the keys of all slots in each step."""

    class Rolling(sound):
        def compact(self, request_ids, num_known, verdict):
            super().compact(request_ids, num_known, verdict)
            for layer in self._groups[0].layers:
                layer[0][:] = layer[0].roll(1, 0)

    return Rolling


CASES = [
    Case("nobody", ("test_kv_manager_is_offered",), __name__),
    Case("heavy", ("test_kv_manager_module_is_light",), "heavy_plugin"),
    *(Case(name, (test,), __name__, is_variant=True) for name, (test, _) in FAULTS.items()),
]


def build(fault):
    def build_faulty(config, context):
        from specdec_kv_prefix import PrefixConfig
        from specdec_kv_prefix.manager import PrefixKVManager

        return fault(PrefixKVManager)(PrefixConfig(), context)

    return build_faulty


@hookimpl
def specdec_kv_managers():
    return [KVManagerSpec(name=name, build=build(fault), api=1) for name, (_, fault) in FAULTS.items()]
