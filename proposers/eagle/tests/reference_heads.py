"""Reference implementations of EAGLE and EAGLE-3 heads: in float64 and without a KV cache. For each node of a draft
tree, the whole path to it is computed anew.

Sources: Li et al. 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3), and the forward passes in the
projects' code.

`reference_eagle` and `reference_eagle3` take a head as published: `tensors` by the names in its file, `config` as in
its config.json. A text has n positions, from 0 on. The head's input at position i is the embedding of x_{i+1} and the
target's hidden state of x_i.

A tree node is a draft token. At depth d, from 1 on, its rotary position is n - 1 + d. The head's input for a node is
the node's embedding and the head's output for the node's parent. A node attends to all positions of the text, to the
node's ancestors and to itself. So the path to a node is a plain causal sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference_layer import Config, Head, Tensors
from torch import Tensor

Tree = Sequence[tuple[int, int]]  # (token id of the target's vocabulary, parent: -1 the root, else an earlier node)


def reference_eagle(
    tensors: Tensors,
    config: Config,
    embed: Callable[[Tensor], Tensor],
    lm_head: Callable[[Tensor], Tensor],
    tokens: Sequence[int],
    features: Tensor,
    tree: Tree = (),
) -> Tensor:
    """Return the logits of an EAGLE-1 or -2 head, float64 [1 + len(tree), vocab_size]. The first row predicts the token
    after the root, which is the last of `tokens`; the other rows predict the token after each node of the tree.

    Args:
        embed: a function that returns the target's embeddings [s, hidden_size] of token ids, int64 [s]. It is not
            called if the head has embed_tokens.
        lm_head: the target's LM head, a function from float64 [s, hidden_size] to [s, vocab_size].
        tokens: n + 1 token ids x_0 .. x_n. The target has not run on the last one, the root.
        features: [n, hidden_size], the target's output after its last norm at x_0 .. x_{n-1}.
        tree: the nodes drafted so far.
    """
    head = Head(tensors, config, embed)

    def fuse(embeddings: Tensor, hidden: Tensor) -> Tensor:
        if config.get("add_para_norm", False):
            embeddings = head.norm("embedding_layernorm", embeddings)
            hidden = head.norm("hidden_states_layernorm", hidden)
        return head.linear("fc", torch.cat([embeddings, hidden], dim=-1))

    def forward(embeddings: Tensor, hidden: Tensor) -> Tensor:
        x = fuse(embeddings, hidden)
        for i in range(head.num_layers):
            normed = x if i == 0 else head.norm(f"layers.{i}.input_layernorm", x)
            x = head.layer(f"layers.{i}", normed, residual=x)
        return x

    outputs = _at_root_and_nodes(head, forward, tokens, features, tree)
    head.check_all_used()
    return lm_head(outputs).double()


def reference_eagle3(
    tensors: Tensors,
    config: Config,
    embed: Callable[[Tensor], Tensor],
    lm_head: Callable[[Tensor], Tensor],
    tokens: Sequence[int],
    features: Tensor,
    tree: Tree = (),
) -> Tensor:
    """Return the logits of an EAGLE-3 head over its draft vocabulary, float64 [1 + len(tree), draft_vocab_size].

    The arguments and rows are those of `reference_eagle`, except that `features` holds the target's auxiliary hidden
    states, concatenated, lowest layer first: [n, 3 * target hidden size]. `embed` and `lm_head` are used only if the
    head has no embedding or LM head of its own. `config` may have the layout of EAGLE's own heads or of speculators,
    and the head's layers may be called midlayer or layers.N.
    """
    config = flat_config(config)
    head = Head({name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}, config, embed)
    feeds_normed = config.get("norm_output", False)

    def forward(embeddings: Tensor, hidden: Tensor) -> Tensor:
        normed = head.norm("layers.0.hidden_norm", hidden)
        first = torch.cat([head.norm("layers.0.input_layernorm", embeddings), normed], dim=-1)
        x = head.layer("layers.0", first, residual=normed if config.get("norm_before_residual", False) else hidden)
        for i in range(1, head.num_layers):
            x = head.layer(f"layers.{i}", head.norm(f"layers.{i}.input_layernorm", x), residual=x)
        return head.norm("norm", x) if feeds_normed else x

    outputs = _at_root_and_nodes(head, forward, tokens, _fused_features(head, features), tree)
    normed = outputs if feeds_normed else head.norm("norm", outputs)
    logits = head.linear("lm_head", normed) if head.has("lm_head.weight") else lm_head(normed).double()
    head.check_all_used()
    return logits


def flat_config(config: Config) -> dict[str, Any]:
    """Return a head's config as one flat dict. The keys nested under transformer_layer_config and eagle_config move to
    the top level; keys that are already there take precedence."""
    nested = {**config.get("transformer_layer_config", {}), **(config.get("eagle_config") or {})}
    return {**nested, **{key: value for key, value in config.items() if value is not None}}


def target_token_ids(tensors: Tensors, draft_vocab_size: int) -> Tensor:
    """Return the target's id of each token in the draft vocabulary, int64 [draft_vocab_size]. The tensor d2t holds the
    difference to each draft id. Without d2t the ids are the same."""
    token_ids = torch.arange(draft_vocab_size)
    return token_ids + tensors["d2t"] if "d2t" in tensors else token_ids


def next_log_probs(
    logits: Callable[[Tree], Tensor], token_ids: Tensor | None = None
) -> Callable[[tuple[int, ...]], dict[int, float]]:
    """Wrap a head as the function that `reference_tree.dynamic_tree` calls: it takes the path of token ids from the
    root's child to a node and returns {token id: log-probability} of the next token.

    Args:
        logits: `reference_eagle` or `reference_eagle3` with all arguments but `tree` given.
        token_ids: the target's id of each draft token id; None if the vocabularies are the same.
    """

    def after(path: tuple[int, ...]) -> dict[int, float]:
        log_probs = logits([(token, depth - 1) for depth, token in enumerate(path)])[-1].log_softmax(dim=-1)
        ids = range(len(log_probs)) if token_ids is None else token_ids.tolist()
        return dict(zip(ids, log_probs.tolist(), strict=True))

    return after


def _at_root_and_nodes(
    head: Head, forward: Callable[[Tensor, Tensor], Tensor], tokens: Sequence[int], features: Tensor, tree: Tree
) -> Tensor:
    """Return the head's outputs at the root and at each node, [1 + len(tree), hidden_size]. Raises ValueError unless
    `tokens` has one entry more than `features`, which must not be empty.

    forward: a function from the embeddings and hidden states of a causal sequence to the head's outputs.
    """
    if not len(tokens) - 1 == len(features) > 0:
        raise ValueError(
            f"{len(tokens)} tokens, {len(features)} features: allowed is one feature less, and at least one"
        )
    known, features = [int(token) for token in tokens[1:]], features.double()
    outputs = [forward(head.embeddings(known), features)[-1]]
    for node in range(len(tree)):
        numbers = _path(tree, node)
        path, parents = [tree[i][0] for i in numbers], [0, *(i + 1 for i in numbers[:-1])]
        hidden = torch.cat([features, torch.stack([outputs[i] for i in parents])])
        outputs.append(forward(head.embeddings([*known, *path]), hidden)[-1])
    return torch.stack(outputs)


def _path(tree: Tree, node: int) -> list[int]:
    """Return the indices of the nodes on the path from the root's child to `node`. Raises ValueError if a node's parent
    is not an earlier node."""
    parent = tree[node][1]
    if not -1 <= parent < node:
        raise ValueError(f"node {node} has parent {parent}: allowed are -1 and the nodes before it")
    return [node] if parent == -1 else [*_path(tree, parent), node]


def _fused_features(head: Head, features: Tensor) -> Tensor:
    """Project the target's auxiliary hidden states, concatenated, to the head's hidden size: [n, hidden_size]."""
    features = features.double()
    if head.config.get("norm_before_fc", False):
        features = head.norm("input_norm", features)
    if head.config.get("fc_norm", False):
        width = head.config.get("target_hidden_size", head.config["hidden_size"])
        parts = features.chunk(features.shape[1] // width, dim=-1)
        features = torch.cat([head.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
    return head.linear("fc", features) if head.has("fc.weight") else features
