"""The decoder that Llama 2/3, Mistral, SmolLM2, Qwen2 and Qwen3 share; they differ by flags of
ModelConfig.

embed -> L x [x + attention(norm(x)); x + mlp(norm(x))] | norm -> head

T tokens this step, H query heads, G KV heads, D head dim, E hidden size, F MLP size, V vocabulary
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from pico_vllm.config.model import ModelConfig
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.layers.attention import Attention, KVStep
from pico_vllm.layers.linear import Linear, Norm, Residual
from pico_vllm.layers.mlp import MLP
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import Rope
from pico_vllm.models.loader import WeightLoader


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of a checkpoint by its Hugging Face name; the head too where it is tied."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }

    def add_linear(name: str, num_out: int, num_in: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)

    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        add_linear(f"{layer}.self_attn.q_proj", q_size, hidden, config.qkv_bias)
        add_linear(f"{layer}.self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        add_linear(f"{layer}.self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        add_linear(f"{layer}.self_attn.o_proj", hidden, q_size, config.o_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        add_linear(f"{layer}.mlp.gate_proj", mlp, hidden, config.mlp_bias)
        add_linear(f"{layer}.mlp.up_proj", mlp, hidden, config.mlp_bias)
        add_linear(f"{layer}.mlp.down_proj", hidden, mlp, config.mlp_bias)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


class DecoderLayer:
    def __init__(self, config: ModelConfig, index: int, loader: WeightLoader) -> None:
        name = f"model.layers.{index}"

        def norm(part: str) -> RMSNorm:
            return RMSNorm(loader.vector(f"{name}.{part}.weight"), config.rms_norm_eps)

        self.attention = Attention(
            index,
            norm=norm("input_layernorm"),
            qkv=loader.linear(*(f"{name}.self_attn.{part}_proj" for part in "qkv")),
            o=loader.linear(f"{name}.self_attn.o_proj"),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.mlp = MLP(
            norm("post_attention_layernorm"),
            gate_up=loader.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
            down=loader.linear(f"{name}.mlp.down_proj"),
        )

    def forward(
        self,
        residual: Residual,
        cos_sin: tuple[Tensor, Tensor] | None,
        kv: KVStep,
        wanted: Tensor | None = None,
        *,
        next_norm: Norm | None = None,
    ) -> Residual:
        residual = self.attention.forward(residual, cos_sin, kv, wanted, next_norm=self.mlp.norm)
        return self.mlp.forward(residual, next_norm)


class LlamaForCausalLM:
    def __init__(self, config: ModelConfig, loader: WeightLoader, max_model_len: int) -> None:
        """Takes every parameter from the loader, which has checked their names and shapes."""
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.dtype = loader.dtype
        self.has_tied_head = config.tie_word_embeddings
        self.rope = Rope(config.rope, config.head_dim, max_model_len, loader.device)
        self.embed = loader.embedding("model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, index, loader) for index in range(config.num_layers)]
        self.norm = RMSNorm(loader.vector("model.norm.weight"), config.rms_norm_eps)
        self.head = (
            loader.tied_head(self.embed) if config.tie_word_embeddings else loader.linear("lm_head")
        )

    @property
    def linears(self) -> list[Linear]:
        """Every linear in the order of a forward pass; a tied head too, whose weight is the
        embedding's."""
        linears = []
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            linears += [attention.qkv, attention.o, mlp.gate_up, mlp.down]
        return [*linears, self.head]

    @property
    def num_bytes(self) -> int:
        """Memory of the linears and the embedding; norms are too small to count."""
        num_bytes = sum(linear.num_bytes for linear in self.linears)
        return num_bytes if self.has_tied_head else num_bytes + self.embed.weight.num_bytes

    def forward(self, batch: ForwardBatch, kv: KVStep, wanted: Tensor | None = None) -> Residual:
        """Hidden states before the last norm: [T, E], or [R, E] where `wanted` names the last token
        of each request. In the last layer the others only leave their keys and values."""
        x_TE = self.embed.forward(batch)
        cos_sin = None if kv.rotates else self.rope.gather(batch.positions, x_TE.dtype)
        residual = Residual(x_TE)
        for layer, next_layer in pairwise(self.layers):
            residual = layer.forward(residual, cos_sin, kv, next_norm=next_layer.attention.norm)
        return self.layers[-1].forward(residual, cos_sin, kv, wanted, next_norm=self.norm)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """[N, V] fp32 from rows of the stream that `forward` gives."""
        return self.head.normed(self.norm, Residual(hidden_NE)).float()
