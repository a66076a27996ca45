"""The specdec plugin for prefix caching: it offers the KV manager `prefix`."""

from collections.abc import Sequence

from attrs import field, frozen

from specdec_core import KVContext, KVManager, KVManagerSpec, hookimpl, whole_number

HELP = "Most KV blocks kept after their requests end, for later ones with the same prefix. 0: none. None: no limit."


@frozen(kw_only=True)
class PrefixConfig:
    """Options of the KV manager `prefix`.

    max_cached_blocks: the most KV-cache blocks that stay cached while no request uses them. None: no limit.

    Raises ConfigError if max_cached_blocks is negative.
    """

    max_cached_blocks: int | None = field(
        default=None, validator=whole_number(0, optional=True), metadata={"help": HELP}
    )


def build(config: PrefixConfig, context: KVContext) -> KVManager:
    from specdec_kv_prefix.manager import PrefixKVManager

    return PrefixKVManager(config, context)


@hookimpl
def specdec_kv_managers() -> Sequence[KVManagerSpec]:
    return [KVManagerSpec(name="prefix", config=PrefixConfig, build=build, api=1)]
