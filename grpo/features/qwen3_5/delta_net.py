"""The layers of Qwen3.5 in plain torch: gated delta nets, and attention with a gate, within documents of packed rows.

A gated delta net (Yang et al. 2024, arXiv:2412.06464) keeps a matrix S for each head in place of keys and values. A
token makes S' = exp(g) S, then S = S' + beta k (v - k S')^T, and reads q S. Documents are cut into chunks. Within a
chunk all tokens are computed at once; S goes from chunk to chunk, in all documents side by side, and begins at 0 in
each. Left out: kernels for GPUs, tensor parallelism, prompts that documents share.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common import Conv1d, Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention
from torchtitan.protocols.module import Module

from grpo.models import own_config
from grpo.types import MicroBatch

CHUNK_TOKENS = 64


class DocumentChunks(NamedTuple):
    """The documents of a micro-batch in chunks: the first chunks of all documents, then the second ones, and so on.

    Longer documents come first, so those that have another chunk are always the first ones.
    """

    place_T: Tensor
    """int64 [B * T]: where a position lies among the chunks, which have CHUNK_TOKENS places each."""
    offset_T: Tensor
    """int64 [B * T]: how many positions of its document come before a position."""
    counts: list[int]
    """How many documents have a first chunk, a second one, and so on."""


def document_chunks(micro: MicroBatch) -> DocumentChunks:
    """Cut a micro-batch's documents into chunks. Waits for the device, which knows how long the documents are.

    They share no prompts (`ShardedModel.lay_out`), whose state they would have to start from.
    """
    lengths_S = micro.document_starts.diff()
    rank_S = lengths_S.argsort(descending=True, stable=True).argsort()
    first_offset_C = torch.arange(
        0,
        micro.longest_document,
        CHUNK_TOKENS,
        device=lengths_S.device,
    )
    count_C = (lengths_S > first_offset_C[:, None]).sum(1)
    first_chunk_C = count_C.cumsum(0) - count_C
    offset_T = micro.positions_BT.flatten()
    chunk_T = first_chunk_C[offset_T // CHUNK_TOKENS] + rank_S.repeat_interleave(lengths_S)
    place_T = chunk_T * CHUNK_TOKENS + offset_T % CHUNK_TOKENS
    return DocumentChunks(place_T, offset_T, count_C.tolist())


def causal_convolution(
    x_TD: Tensor,
    weight_DW: Tensor,
    offset_T: Tensor,
) -> Tensor:
    """Weigh each channel of a token and of the W - 1 tokens before it in its document, and add them up: [T, D]."""
    out_TD = x_TD * weight_DW[:, -1]
    for back in range(1, weight_DW.shape[1]):
        earlier_TD = F.pad(x_TD, (0, 0, back, 0))[: len(x_TD)]
        earlier_TD = earlier_TD.where((offset_T >= back)[:, None], 0)
        out_TD = out_TD + earlier_TD * weight_DW[:, -1 - back]
    return out_TD


def gated_delta_rule(
    q_TNK: Tensor,
    k_TNK: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    chunks: DocumentChunks,
) -> Tensor:
    """Return what each token reads from its document's states: [T, N, V] for N heads. All inputs are float32."""
    num_places = sum(chunks.counts) * CHUNK_TOKENS
    of_chunks = within_chunks(
        q_TNK,
        k_TNK,
        v_TNV,
        g_TN,
        beta_TN,
        chunks.place_T,
        num_places,
    )
    state = q_TNK.new_zeros(chunks.counts[0], *q_TNK.shape[1:], v_TNV.shape[-1])
    outputs = []
    for q, scores, written, held, k, decay in zip(*(values.split(chunks.counts) for values in of_chunks), strict=True):
        state = state[: len(q)]
        written = written - held @ state
        outputs.append(q @ state + scores @ written)
        state = state * decay + k @ written
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.place_T)


def within_chunks(
    q_TNK,
    k_TNK,
    v_TNV,
    g_TN,
    beta_TN,
    place_T: Tensor,
    num_places: int,
) -> list[Tensor]:
    """Compute for all chunks at once what their states need not be known for, each [C, N, ..].

    Of the L = CHUNK_TOKENS places of a chunk: queries that read the state before it, what queries read of the chunk's
    own tokens, what tokens write, what they hold of the state before, keys that write into the state behind it, and
    how much it decays. This is the paper's WY form: tokens write what solves a triangular system.
    """

    def in_chunks(x: Tensor) -> Tensor:
        """Lay [T, N, ..] out as [C, N, L, ..], with 0 in places without a token."""
        places = x.new_zeros(num_places, *x.shape[1:]).index_copy(0, place_T, x)
        return places.unflatten(0, (-1, CHUNK_TOKENS)).transpose(1, 2)

    q, k, v, beta = map(in_chunks, (q_TNK, k_TNK, v_TNV, beta_TN[..., None]))
    decay_CNL = in_chunks(g_TN).cumsum(-1)  # since the chunk's beginning, as a logarithm
    decay_CNL1 = decay_CNL.exp()[..., None]
    decay_to_end_CNL1 = (decay_CNL[..., -1:] - decay_CNL).exp()[..., None]
    is_later_LL = q.new_ones(CHUNK_TOKENS, CHUNK_TOKENS).triu(1).bool()
    between_CNLL = decay_CNL[..., :, None] - decay_CNL[..., None, :]
    between_CNLL = between_CNLL.masked_fill(is_later_LL, -torch.inf).exp()
    system_CNLL = (k * beta) @ k.mT * between_CNLL  # its diagonal is taken to be 1
    right = torch.cat([v * beta, k * beta * decay_CNL1], dim=-1)
    solved = torch.linalg.solve_triangular(
        system_CNLL,
        right,
        upper=False,
        unitriangular=True,
    )
    written, held = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores_CNLL = q @ k.mT * between_CNLL
    return [q * decay_CNL1, scores_CNLL, written, held, (k * decay_to_end_CNL1).mT, decay_CNL1[..., -1:, :]]


class GatedDeltaNet(Module):
    """A layer with states, which a block has instead of attention. Its submodules have the names of Hugging Face's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        hf: transformers.PretrainedConfig

        def mask(self, micro: MicroBatch) -> DocumentChunks:
            """Return what the layer gets in place of a mask."""
            return document_chunks(micro)

    def __init__(self, config: Config):
        super().__init__()
        hf = config.hf
        init = {"param_init": config.param_init}
        self.num_heads = hf.linear_num_value_heads
        self.num_key_heads = hf.linear_num_key_heads
        keys = self.num_key_heads * hf.linear_key_head_dim
        values = self.num_heads * hf.linear_value_head_dim
        self.widths = [keys, keys, values]
        channels = sum(self.widths)
        self.conv1d = Conv1d.Config(
            in_channels=channels,
            out_channels=channels,
            kernel_size=hf.linear_conv_kernel_dim,
            groups=channels,
            bias=False,
            **init,
        ).build()
        outputs = {
            "in_proj_qkv": channels,
            "in_proj_z": values,
            "in_proj_b": self.num_heads,
            "in_proj_a": self.num_heads,
        }
        for name, width in outputs.items():
            setattr(self, name, Linear.Config(in_features=hf.hidden_size, out_features=width, **init).build())
        self.out_proj = Linear.Config(in_features=values, out_features=hf.hidden_size, **init).build()
        self.norm = RMSNorm.Config(normalized_shape=hf.linear_value_head_dim, eps=hf.rms_norm_eps, **init).build()
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    def forward(
        self,
        x_BTD: Tensor,
        chunks: DocumentChunks,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to packed rows. `positions` is what attention gets too.

        What lies between its linear layers is computed again in the backward: the float32 values of the rule would take
        more than twenty times the memory of its input.
        """
        x_TD = x_BTD.flatten(0, 1)
        inputs = [layer(x_TD) for layer in (self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)]
        read_TD = checkpoint(
            self._read,
            *inputs,
            chunks,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return self.out_proj(read_TD).view_as(x_BTD)

    def _read(
        self,
        qkv_TD,
        gate_TD,
        a_TN,
        b_TN,
        chunks: DocumentChunks,
    ) -> Tensor:
        """Read from the states, normalize what each head gives and multiply it by its gate."""
        q_TNK, k_TNK, v_TNV, g_TN, beta_TN = self.rule_inputs(
            qkv_TD,
            a_TN,
            b_TN,
            chunks.offset_T,
        )
        read_TNV = gated_delta_rule(q_TNK, k_TNK, v_TNV, g_TN, beta_TN, chunks)
        read_TNV = read_TNV.to(qkv_TD.dtype).float()  # rounded where engines round
        normed_TNV = F.rms_norm(
            read_TNV,
            read_TNV.shape[-1:],
            self.norm.weight.float(),
            self.norm.eps,
        )
        return (normed_TNV.flatten(1) * F.silu(gate_TD.float())).to(qkv_TD.dtype)

    def rule_inputs(
        self,
        qkv_TD,
        a_TN,
        b_TN,
        offset_T: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return queries, keys, values, decays as logarithms and betas of all heads, float32 [T, N, ..]."""
        convolved_TD = causal_convolution(qkv_TD.float(), self.conv1d.weight[:, 0].float(), offset_T)
        convolved_TD = F.silu(convolved_TD).to(qkv_TD.dtype).float()  # likewise
        q_TD, k_TD, v_TD = convolved_TD.split(self.widths, dim=1)
        repeats = self.num_heads // self.num_key_heads
        q_TNK, k_TNK = (
            _unit(part_TD.unflatten(1, (self.num_key_heads, -1))).repeat_interleave(repeats, dim=1)
            for part_TD in (q_TD, k_TD)
        )
        g_TN = -self.A_log.float().exp() * F.softplus(a_TN.float() + self.dt_bias.float())
        v_TNV = v_TD.unflatten(1, (self.num_heads, -1))
        return q_TNK * q_TNK.shape[-1] ** -0.5, k_TNK, v_TNV, g_TN, b_TN.sigmoid().float()


def _unit(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@own_config
class GatedAttention(GQAttention):
    """Grouped-query attention with a sigmoid gate on what each head gives. wq has each head's query, then its gate."""

    def forward(self, x_BLD, attention_masks, positions=None):
        """Apply the layer. The names of the arguments are torchtitan's."""
        queries_and_gates, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)
        q_BLNH, gate_BLNH = queries_and_gates.unflatten(2, (-1, 2)).unbind(3)
        q_BLNH, k_BLNH = self.rope(self.q_norm(q_BLNH), self.k_norm(k_BLNH), positions)
        out_BLNH = self.inner_attention(
            q_BLNH,
            k_BLNH,
            v_BLNH,
            attention_masks=attention_masks,
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )
        return self.wo((out_BLNH * gate_BLNH.sigmoid()).flatten(2))
