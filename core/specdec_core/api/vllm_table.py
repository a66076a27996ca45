"""Arguments of vLLM that have no counterpart here, and their values that change nothing.

The arguments are those of `EngineArgs`, `LLM` and `SpeculativeConfig` in vLLM 0.32, and some of older versions. A value
changes nothing if vLLM does with it what this engine always does. For every argument, None changes nothing: left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen
class Foreign:
    """An argument of vLLM.

    neutral: the values that change nothing here, besides None.
    reason: what this engine does instead, for errors.
    """

    neutral: tuple[Any, ...]
    reason: str


def _all(reason: str, **neutral: Any) -> dict[str, Foreign]:
    """Make the table's entries for arguments that are refused for the same reason.

    neutral: for each argument its neutral value, or a tuple of several; an empty tuple if only None is neutral.
    """
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in neutral.items()}
    return {name: Foreign(each, reason) for name, each in values.items()}


EITHER = (False, True)
IN_VLLM = "vLLM itself does that, and specdec-vllm runs drafting methods in it"

ENGINE: Mapping[str, Foreign] = {
    **_all(
        f"all layers are in each process, where tensor_parallel_size splits them; {IN_VLLM}", pipeline_parallel_size=1
    ),
    **_all("each rank of tensor_parallel_size is a process of this machine", distributed_executor_backend="mp"),
    **_all(
        f"there is one engine, on this machine; {IN_VLLM}",
        data_parallel_size=1,
        data_parallel_rank=0,
        data_parallel_size_local=1,
        data_parallel_backend="mp",
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        nnodes=1,
        node_rank=0,
        max_parallel_loading_workers=(),
        disable_custom_all_reduce=EITHER,
        enable_expert_parallel=False,
        enable_eplb=False,
        enable_dbo=False,
        ray_workers_use_nsight=False,
        worker_cls="auto",
        worker_extension_cls="",
    ),
    **_all("device chooses it, as in device='cuda:1'", device_ids=()),
    **_all(
        "prompts longer than max_num_batched_tokens are cut into chunks, and there is no other limit of a chunk",
        enable_chunked_prefill=True,
        long_prefill_token_threshold=0,
        max_num_scheduled_tokens=(),
        max_num_partial_prefills=1,
        max_long_partial_prefills=1,
        disable_chunked_mm_input=False,
    ),
    **_all(
        "requests run first come, first served, one step after the other, and no more than max_num_seqs at once",
        scheduling_policy="fcfs",
        scheduler_cls=(),
        async_scheduling=False,
        num_scheduler_steps=1,
        multi_step_stream_outputs=EITHER,
        scheduler_delay_factor=0,
        num_lookahead_slots=0,
        disable_async_output_proc=EITHER,
        max_num_queued_reqs=(),
        max_num_queued_tokens=(),
    ),
    **_all("streams have an item for each step", stream_interval=1),
    **_all(
        "the KV manager decides whether prefixes are cached, so choose one as kv_manager",
        enable_prefix_caching=False,
    ),
    **_all("requests that are preempted are computed again", swap_space=(0, 4), preemption_mode="recompute"),
    **_all(
        "weights and KV cache stay on the device", cpu_offload_gb=0, offload_backend="auto", enable_sleep_mode=False
    ),
    **_all("keys and values have the type of the activations", kv_cache_dtype="auto", calculate_kv_scales=False),
    **_all("the KV cache has blocks, and layers with a window use it", disable_sliding_window=False),
    **_all("the KV cache has blocks in any case", use_v2_block_manager=EITHER),
    **_all("num_kv_blocks sets the number of blocks", num_gpu_blocks_override=()),
    **_all("num_kv_blocks or gpu_memory_utilization sets the cache's size", kv_cache_memory_bytes=()),
    **_all("keys and values are not sent to other engines", kv_transfer_config=(), kv_events_config=()),
    **_all(
        "transformers' classes load the checkpoint, with the config.json that it has",
        load_format="auto",
        config_format="auto",
        model_impl=("auto", "transformers"),
        model_loader_extra_config=({},),
        hf_overrides=({},),
        hf_config_path=(),
        rope_scaling=({},),
        rope_theta=(),
        use_tqdm_on_load=EITHER,
        pt_load_map_location="cpu",
    ),
    **_all("the environment variable HF_HUB_CACHE sets it", download_dir=()),
    **_all("the environment variable HF_TOKEN sets it", hf_token=()),
    **_all("quantization takes names and configs", quantization_config=(), quantization_param_path=()),
    **_all("only the server names the model: spec-decode serve --served-model-name", served_model_name=()),
    **_all(
        "requests without parameters of their own have those of SamplingParams(), not of generation_config.json",
        generation_config="vllm",
        override_generation_config=({},),
    ),
    **_all("a request may ask for any number of logprobs, of the unchanged logits", max_logprobs=(20, -1)),
    **_all("logprobs are of the unchanged logits", logprobs_mode="raw_logprobs"),
    **_all("SamplingParams has a request's logits processors", logits_processors=([],)),
    **_all(
        "the plugin that is installed compiles grammars",
        guided_decoding_backend="auto",
        structured_outputs_config=({},),
    ),
    **_all("outputs are not parsed", reasoning_parser=""),
    **_all(
        "models are not compiled or captured, and plugins choose the operations",
        compilation_config=(0, {}),
        optimization_level=0,
        max_seq_len_to_capture=8192,
        cudagraph_capture_sizes=(),
        max_cudagraph_capture_size=(),
        attention_backend=(),
        attention_config=({},),
        disable_cascade_attn=EITHER,
        moe_backend="auto",
        linear_backend="auto",
        kernel_config=({},),
        performance_mode="balanced",
    ),
    **_all(
        "models read and generate text only",
        task=("auto", "generate"),
        convert=("auto", "none"),
        language_model_only=EITHER,
        limit_mm_per_prompt=({},),
        mm_processor_kwargs=({},),
        disable_mm_preprocessor_cache=EITHER,
        skip_mm_profiling=EITHER,
        allowed_local_media_path="",
        allowed_media_domains=(),
        enable_prompt_embeds=False,
        pooler_config=(),
        override_pooler_config=(),
    ),
    **_all(
        "adapters are not supported: merge them into the weights",
        enable_lora=False,
        max_loras=1,
        max_lora_rank=16,
        max_cpu_loras=(),
        lora_dtype="auto",
        lora_modules=(),
        fully_sharded_loras=False,
        enable_prompt_adapter=False,
    ),
    **_all(
        "requests are not logged or traced; get_metrics() and RequestOutput.speculation have the counts",
        enable_log_requests=False,
        disable_log_requests=True,
        aggregate_engine_logging=False,
        otlp_traces_endpoint=(),
        collect_detailed_traces=(),
        show_hidden_metrics_for_version=(),
        kv_cache_metrics=False,
        cudagraph_metrics=False,
        per_request_spec_decode_metrics="none",
        profiler_config=({},),
    ),
    **_all(
        "speculative_config has these as method, model and num_speculative_tokens",
        spec_method=(),
        spec_model=(),
        spec_tokens=(),
    ),
    **_all("there are no further options", additional_config=({},)),
}

OPTIONS: Mapping[str, Foreign] = _all(
    "", device="auto", block_size=(), max_num_seqs=(), max_num_batched_tokens=(), enforce_eager=()
)
"""Options of this engine, with values of vLLM that it does not have and that mean the same as leaving them out."""

SPECULATION: Mapping[str, Foreign] = {
    **_all("draft_tensor_parallel_size is the draft's", tensor_parallel_size=1),
    **_all(
        "the draft has the target's type, operations and kind of KV cache",
        moe_backend="auto",
        attention_backend=(),
        kv_cache_dtype="auto",
        draft_load_config=(),
    ),
    **_all(
        "verifier names the acceptance rule, and 'typical' has posterior_threshold and posterior_alpha",
        acceptance_method="rejection_sampler",
        posterior_threshold=(),
        posterior_alpha=(),
        rejection_sample_method="standard",
        synthetic_acceptance_rates=(),
        synthetic_acceptance_length=(),
    ),
    **_all(
        "drafts are made one level after the other",
        parallel_drafting=False,
        index_share_for_mtp_iteration=(),
        dspark_draft_topk=(),
    ),
    **_all("the engine has no such choice", use_local_argmax_reduction=False, disable_eagle_block_drop=False),
    **_all(
        "disable_by_batch_size, or adaptive_draft_length, adapts drafts",
        num_speculative_tokens_per_batch_size=(),
        enable_adaptive_verification=False,
    ),
    **_all(
        "nothing reads it",
        target_model_config=(),
        target_parallel_config=(),
        draft_model_config=(),
        draft_parallel_config=(),
    ),
}
