"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783): a pre-norm decoder with rotary, grouped-query attention and SwiGLU.

  h = embed(tokens)
  h = h + attention(norm(h));  h = h + mlp(norm(h))      in each layer
  logits = head(norm(h))

Mistral is Llama with sliding windows, Qwen2 is Llama with biases on q, k and v: `ModelSpec` says so, the formula is
this one. Qwen3 puts its own attention into it (qwen3.py). Shape letters: kernels/ops.py.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from aserve.kernels.ops import KVLayer, Ops
from aserve.models.attention import QKV, RotaryAttention, output_projection
from aserve.models.interface import ForwardBatch
from aserve.models.layers import (
    GatedMLP,
    Linear,
    LinearMethod,
    LinearShape,
    ShardedEmbedding,
    ShardedHead,
    embedding,
    fill_share,
    load_tensor,
)
from aserve.models.sharding import Split
from aserve.models.spec import ModelSpec
from aserve.models.weights import Weights


class Attention(Protocol):
    """A layer's attention block."""

    def __call__(self, x_TE: Tensor, kv: KVLayer, batch: ForwardBatch) -> Tensor:
        """[T, E] to [T, E]. Writes the step's keys and values to kv."""
        ...


class FeedForward(Protocol):
    """A layer's feed-forward block."""

    def __call__(self, x_TE: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, E] to [T, E], of each token by itself."""
        ...


AttentionFactory = Callable[[ModelSpec, Ops, Weights, LinearMethod, str, RotaryAttention], Attention]
"""Makes the attention block whose checkpoint tensors are named after the prefix, the fifth argument."""
FeedForwardFactory = Callable[[ModelSpec, Ops, Weights, LinearMethod, str], FeedForward]
"""Makes the feed-forward block, likewise."""


class LlamaAttention:
    """out(attend(rope(q), rope(k), v))."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        weights: Weights,
        linear: LinearMethod,
        prefix: str,
        attend: RotaryAttention,
    ) -> None:
        self._qkv = QKV(spec, weights, linear, prefix)
        self._attend = attend
        self._out = output_projection(spec, weights, linear, prefix)

    def __call__(self, x_TE: Tensor, kv: KVLayer, batch: ForwardBatch) -> Tensor:
        """[T, E] to [T, E]."""
        return self._out(self._attend(*self._qkv(x_TE, batch), kv, batch), batch)


class LlamaLayer:
    """One layer's weights. What adds the blocks up, norms included, is `Llama.forward`."""

    def __init__(self, attention_norm_E: Tensor, attention: Attention, mlp_norm_E: Tensor, mlp: FeedForward) -> None:
        self.attention_norm_E = attention_norm_E
        self.attention = attention
        self.mlp_norm_E = mlp_norm_E
        self.mlp = mlp


class Llama:
    """The decoder, a `CausalLM`. cos_sin_LD: a rope table as long as the context that will be served."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        weights: Weights,
        linear: LinearMethod,
        cos_sin_LD: Tensor,
        attention: AttentionFactory = LlamaAttention,
        feed_forward: FeedForwardFactory = GatedMLP,
    ) -> None:
        self.spec = spec
        self._ops = ops

        self._head: Linear

        def layer(index: int) -> LlamaLayer:
            prefix = f"model.layers.{index}"
            attend = RotaryAttention(spec, ops, cos_sin_LD, spec.windows[index])
            return LlamaLayer(
                load_tensor(weights, f"{prefix}.input_layernorm.weight", spec.hidden_size),
                attention(spec, ops, weights, linear, f"{prefix}.self_attn", attend),
                load_tensor(weights, f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
                feed_forward(spec, ops, weights, linear, f"{prefix}.mlp"),
            )

        def table_VE() -> Tensor:
            out_VE = weights.empty(spec.vocab_share, spec.hidden_size)
            fill_share(weights, out_VE, "model.embed_tokens.weight", Split.VOCABULARY)
            return out_VE

        if spec.tie_embeddings or not spec.has_head:
            weights.skip("lm_head.weight")
        if spec.tie_embeddings and spec.has_head:
            self._embed, self._head = linear.tie(table_VE())
        else:
            self._embed = embedding(table_VE())
        self._layers = [layer(index) for index in range(spec.num_layers)]
        final_norm_E = load_tensor(weights, "model.norm.weight", spec.hidden_size)
        # The norm after a layer's last sum is the next layer's first, so that every sum is fused with a norm.
        self._next_norms = [layer.attention_norm_E for layer in self._layers[1:]] + [final_norm_E]
        if spec.has_head and not spec.tie_embeddings:
            shape = LinearShape({"lm_head": spec.vocab_share}, spec.hidden_size, split=Split.VOCABULARY)
            self._head = linear.load(weights, shape)
        if weights.shard.size > 1:
            self._embed = ShardedEmbedding(self._embed, weights.shard, spec.vocab_share)
            if spec.has_head:
                self._head = ShardedHead(self._head, weights.shard, spec.vocab_size)

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        """Hidden states after the final norm; h_TE is the residual stream, x_TE what its norm gives.

        Behind the last layer's keys and values nobody reads a token but those that are wanted, so that the last
        feed-forward block computes them alone: of a prompt the last one.
        """
        ops, eps = self._ops, self.spec.norm_eps
        h_TE = self._embed(token_ids_T)
        x_TE = ops.rms_norm(h_TE, self._layers[0].attention_norm_E, eps)
        for layer, cache, next_norm_E in zip(self._layers, kv, self._next_norms, strict=True):
            x_TE = layer.attention(x_TE, cache, batch)
            if layer is self._layers[-1] and batch.wanted_N is not None:
                x_TE, h_TE = x_TE.index_select(0, batch.wanted_N), h_TE.index_select(0, batch.wanted_N)
                if not len(x_TE):
                    break
            x_TE, h_TE = ops.add_rms_norm(x_TE, h_TE, layer.mlp_norm_E, eps)
            x_TE, h_TE = ops.add_rms_norm(layer.mlp(x_TE, batch), h_TE, next_norm_E, eps)
        return x_TE

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """[S, V], in the type of the weights."""
        return self._head(hidden_SE)
