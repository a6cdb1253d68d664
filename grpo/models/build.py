"""Hugging Face checkpoints as torchtitan models: config.json -> sharded module, and weights in and out under HF names.

A model built here does not return logits: its LM head (`logprobs.LogprobHead`) returns the log-probs of given targets
and the entropy.

Left out: mixture of experts, pipeline and context parallelism, quantized checkpoints.
"""

import grpo.models.titan_on_cpu  # noqa: F401

# isort: split

import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import CosSinRoPE, Embedding, RMSNorm
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.utils import set_default_dtype
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.logprob_head import LogprobHead
from grpo.types import MicroBatch

ACTIVATION_CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map*",
    "added_tokens*",
    "chat_template*",
    "*.model",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the ones whose frequencies do not change with the length
EXPORT_SHARD_BYTES = 4 * 2**30
# Weights always come from a checkpoint. Drawing random ones first would also fail where a role's first rank is not on
# the first GPU: DTensor's random states take the GPU's index from the rank within the role.
_NO_INIT = {"weight": skip_param_init}


class _LogprobDecoder(Decoder):
    """A torchtitan decoder whose forward ends in `LogprobHead`."""

    def forward(self, tokens_BT, targets_BT, positions_BT, attention_masks, temperature_bits_BT):
        h_BTD = self.tok_embeddings(tokens_BT)
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, attention_masks, positions_BT)
        return self.lm_head(self.norm(h_BTD), targets_BT, temperature_bits_BT)


class Qwen3Policy(_LogprobDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass


class Llama3Policy(_LogprobDecoder, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass


class HFRoPE(CosSinRoPE):
    """Rotary embedding in Hugging Face's layout, with frequencies computed by transformers.

    Torchtitan's own Llama form rotates interleaved pairs and permutes wq and wk between the two layouts, which silently
    scrambles shards under FSDP x TP. Here weights are laid out as in the checkpoint.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        inv_freq: tuple[float, ...] = ()
        """Radians per position, one for each pair of dimensions."""
        attention_factor: float = 1.0
        """Multiplies cos and sin (YaRN)."""

    def _precompute_cache(self) -> torch.Tensor:
        inv_freq = torch.tensor(self.config.inv_freq, dtype=torch.float32)
        angles = torch.outer(torch.arange(self.config.max_seq_len, dtype=torch.float32), inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.attention_factor


class LlamaAdapter(Llama3StateDictAdapter):
    """HF names for Llama, without the permutation that `HFRoPE` makes unnecessary."""

    def _permute(self, w, n_heads_arg, dim1=None, dim2=None):
        return w

    def _reverse_permute(self, w, n_heads_arg, dim1=None, dim2=None):
        return w

    def _validate_hf_rope_config(self, *unused) -> None:
        """Nothing to compare: the frequencies come from the HF config."""


class DocumentAttention(VarlenAttention):
    """Packed attention for any device: documents as rows of one padded scaled dot-product attention.

    Exact, and quick where documents are short or of similar length; not for long rows on GPUs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config):
        Module.__init__(self)  # the parent's constructor asks for GPU kernels

    # torchtitan declares shardings for these argument names
    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **unused):
        bounds = attention_masks.cu_seq_q.to(q_BLNH.device)
        starts_S, lengths_S = bounds[:-1], bounds.diff()
        offsets_P = torch.arange(int(lengths_S.max()), device=bounds.device)
        real_SP = offsets_P < lengths_S[:, None]
        # padding repeats the last token of all; it stands behind its document, where causal attention never looks
        index_SP = (starts_S[:, None] + offsets_P).clamp(max=int(bounds[-1]) - 1)
        q, k, v = (x.flatten(0, 1)[index_SP].transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)[real_SP].view(q_BLNH.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face config -> torchtitan config
# ---------------------------------------------------------------------------------------------------------------------


def resolve_folder(path: str) -> str:
    """A local folder as it is, a hub name as the folder it was downloaded to; FileNotFoundError says the way out."""
    folder = pathlib.Path(path)
    if folder.is_dir():
        for needed in ("config.json", "tokenizer_config.json"):
            if not (folder / needed).is_file():
                raise FileNotFoundError(
                    f"model folder {folder.resolve()} has no {needed}; it must be a Hugging Face folder"
                )
        return str(folder)
    if (
        path.startswith((".", "/", "~"))
        or path.count("/") != 1
        or (folder.parent.is_dir() and path.startswith("runs/"))
    ):
        raise FileNotFoundError(f"model folder {folder.absolute()} does not exist")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return huggingface_hub.snapshot_download(
            path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{path} is neither a local folder nor a hub model that could be downloaded ({type(error).__name__}); "
            "check the name, the network, HF_HUB_OFFLINE and, for gated models, your hub token"
        ) from error


def fetch_folder(path: str, control: dist.ProcessGroup) -> str:
    """`resolve_folder` on every node: its first rank downloads, the others then find it. Collective over `control`."""
    if os.environ["LOCAL_RANK"] == "0":
        resolve_folder(path)
    dist.barrier(group=control)
    return resolve_folder(path)


def check_folder(folder: str, max_sequence_tokens: int, tensor_parallel: int) -> None:
    """Refuse a model that cannot be loaded or is too short for the configured lengths, before it is loaded.

    Raises:
        FileNotFoundError: no weights in the folder.
        ValueError: an unsupported model, or lengths or shards that do not fit, with the numbers.
    """
    config = read_hf_config(folder)
    if not list(pathlib.Path(folder).glob("*.safetensors")):
        raise FileNotFoundError(f"model folder {folder} has no .safetensors files")
    if max_sequence_tokens > config.max_position_embeddings:
        raise ValueError(
            f"prompts and completions of up to {max_sequence_tokens} tokens do not fit into {folder}, which has "
            f"{config.max_position_embeddings} positions (max_position_embeddings); lower --data.max-prompt-tokens or "
            "--generator.max-completion-tokens"
        )
    if config.num_key_value_heads % tensor_parallel or config.vocab_size % tensor_parallel:
        raise ValueError(
            f"{folder} has {config.num_key_value_heads} key-value heads and {config.vocab_size} vocabulary entries; "
            f"tensor_parallel={tensor_parallel} must divide both"
        )


def stop_token_ids(folder: str, tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: the tokenizer's EOS and those of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    if (pathlib.Path(folder) / "generation_config.json").is_file():
        more = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(more if isinstance(more, list) else [] if more is None else [more])
    return sorted(ids)


def read_hf_config(folder: str) -> transformers.PretrainedConfig:
    """Read config.json and refuse what this project cannot train. Raises ValueError naming the field."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type not in ("qwen3", "llama"):
        raise ValueError(f"{folder} is a {config.model_type} model; dense qwen3 and llama models are supported")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{folder}: rope_type {rope_type} is not supported, only {', '.join(ROPE_TYPES)}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise ValueError(f"{folder}: attention_bias and mlp_bias are not supported; these models have none")
    return config


def _rope_frequencies(hf: transformers.PretrainedConfig) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [head_dim / 2], factor on cos and sin) as transformers' own models compute them."""
    if hf.rope_parameters.get("rope_type", "default") != "default":
        return ROPE_INIT_FUNCTIONS[hf.rope_parameters["rope_type"]](hf, device="cpu")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return hf.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim), 1.0


def titan_config(
    hf: transformers.PretrainedConfig, attention: str, chunk_tokens: int, compiled: bool = False
) -> Decoder.Config:
    """The torchtitan model config of a Hugging Face one, for any dense size. `attention` is flex or documents."""
    qwen = hf.model_type == "qwen3"
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    inv_freq, attention_factor = _rope_frequencies(hf)
    rope_config = HFRoPE.Config(
        dim=head_dim,
        max_seq_len=hf.max_position_embeddings,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
    )

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_NO_INIT)

    def block() -> Qwen3TransformerBlock.Config | Llama3TransformerBlock.Config:
        block_type = Qwen3TransformerBlock if qwen else Llama3TransformerBlock
        return block_type.Config(
            attention_norm=norm(hf.hidden_size),
            ffn_norm=norm(hf.hidden_size),
            attention=make_gqa_config(
                dim=hf.hidden_size,
                n_heads=hf.num_attention_heads,
                n_kv_heads=hf.num_key_value_heads,
                head_dim=head_dim,
                wqkv_param_init=_NO_INIT,
                wo_param_init=_NO_INIT,
                inner_attention=(FlexAttention if attention == "flex" else DocumentAttention).Config(),
                rope=rope_config,
                qk_norm=norm(head_dim) if qwen else None,
            ),
            feed_forward=make_ffn_config(
                dim=hf.hidden_size, hidden_dim=hf.intermediate_size, w1_param_init=_NO_INIT, w2w3_param_init=_NO_INIT
            ),
        )

    tied = bool(hf.tie_word_embeddings)
    return (Qwen3Policy if qwen else Llama3Policy).Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        norm=norm(hf.hidden_size),
        layers=[block() for _ in range(hf.num_hidden_layers)],
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=hf.vocab_size,
            embedding_dim=hf.hidden_size,
            param_init=_NO_INIT,
        ),
        lm_head=LogprobHead.Config(
            in_features=hf.hidden_size,
            out_features=hf.vocab_size,
            param_init=_NO_INIT,
            chunk_tokens=chunk_tokens,
            compile=compiled,
        ),
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sharded model with its weights
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class ShardedModel:
    """A model spread over this role's ranks, and what is needed to move weights between it and HF names."""

    module: nn.Module
    adapter: Qwen3StateDictAdapter | LlamaAdapter
    parallel_dims: ParallelDims
    device: torch.device
    folder: str
    """Hugging Face folder the weights came from."""
    hf_config: transformers.PretrainedConfig
    spmd_context: object = field(repr=False)

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank takes."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel ranks; tensor-parallel ranks count once."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 1 if mesh is None else mesh.size()

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's position among those that share each layer."""
        return self.parallel_dims.get_mesh("tp").get_local_rank() if self.parallel_dims.tp_enabled else 0

    def logprobs(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs_BT, entropy_BT) of a micro-batch's targets, float32, nats, at their sampling temperatures.

        The micro-batch lies on this rank's device. Collective over the role's ranks.
        """
        # as bits, because FSDP rounds floats among a module's inputs to the compute dtype: 0.7 would become 0.6992
        temperature_bits_BT = micro.temperatures_BT.view(torch.int32)
        with self.spmd_context():
            masks = self.module.get_attention_masks(micro.positions_BT)
            return self.module(micro.ids_BT, micro.targets_BT, micro.positions_BT, masks, temperature_bits_BT)


def build_model(
    model: ModelConfig,
    trainer: TrainerConfig,
    folder: str,
    *,
    world_size: int,
    device: torch.device,
    tensor_parallel: int,
    data_replicas: int,
    frozen: bool = False,
) -> ShardedModel:
    """Shard a Hugging Face folder's model over the default process group and load its weights.

    A trained model keeps float32 master weights; a frozen one holds `model.dtype` and no gradients.
    Collective over the role's ranks.
    """
    attention = model.attention if model.attention != "auto" else "flex" if device.type == "cuda" else "documents"
    hf = read_hf_config(folder)
    compiled = trainer.compile and device.type == "cuda"
    config = titan_config(hf, attention, trainer.logprob_chunk_tokens, compiled)
    # spmd_types, torchtitan's default, fails for more than one rank on this torch
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        tensor_parallel_degree=tensor_parallel,
        data_parallel_replicate_degree=data_replicas,
    )
    parallel_dims = ParallelDims.from_config(parallelism, world_size)
    training = TrainingConfig(dtype=model.dtype if frozen else "float32", mixed_precision_param=model.dtype)
    titan_dist.set_spmd_backend(parallelism.spmd_backend)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's own start would, which an existing group skips
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig()))
    if tensor_parallel > 1:  # LogprobHead reduces over the vocabulary itself
        config.lm_head.sharding_config = ShardingConfig(state_shardings=config.lm_head.sharding_config.state_shardings)

    with torch.device("meta"), set_default_dtype(getattr(torch, training.dtype)):
        module = config.build()
    parallelize = parallelize_qwen3 if hf.model_type == "qwen3" else parallelize_llama
    module = parallelize(
        module,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled, components=["model"]),
        ac_config=None if frozen else ACTIVATION_CHECKPOINTING[trainer.activation_checkpointing],
        dump_folder="",
    )
    for part in module.modules():
        if device.type == "cpu" and isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    module.to_empty(device=device)
    with torch.no_grad():
        module.init_weights(buffer_device=None)
    module.requires_grad_(not frozen)

    adapter_type = Qwen3StateDictAdapter if hf.model_type == "qwen3" else LlamaAdapter
    sharded = ShardedModel(
        module=module,
        adapter=adapter_type(config, folder),
        parallel_dims=parallel_dims,
        device=device,
        folder=folder,
        hf_config=hf,
        spmd_context=titan_dist.get_spmd_context(parallel_dims=parallel_dims),
    )
    load_weights(sharded)
    return sharded


def load_weights(model: ShardedModel) -> None:
    """Read the folder's safetensors into the shards. Collective over the role's ranks."""
    tensors = model.adapter.to_hf(model.module.state_dict())
    dcp.load(tensors, storage_reader=model.adapter.get_hf_storage_reader(model.folder))
    model.module.load_state_dict(model.adapter.from_hf(tensors), strict=False)


def hf_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor in `dtype`), one transformer block at a time, so that only one block is ever gathered.

    Shards are cast before they are gathered, which halves the traffic of bfloat16. Tied embeddings yield no
    lm_head.weight. Collective over the role's ranks: all iterate in lock step, and to the end.
    """
    module = model.module
    parts = [("tok_embeddings.", module.tok_embeddings)]
    parts += [(f"layers.{name}.", block) for name, block in module.layers.items()]
    parts += [("norm.", module.norm), ("lm_head.", module.lm_head)]
    for prefix, part in parts:
        for name, value in model.adapter.to_hf(part.state_dict(prefix=prefix)).items():
            shard = value.detach().to(dtype)
            yield name, shard.full_tensor() if isinstance(shard, DTensor) else shard


def export_hf(model: ShardedModel, target: str | pathlib.Path, dtype: torch.dtype) -> None:
    """Write a folder that `from_pretrained` and vLLM load. Collective over the role's ranks; its rank 0 writes."""
    from safetensors.torch import save_file

    target, writes = pathlib.Path(target), dist.get_rank() == 0
    partial = target.with_name(target.name + ".partial")
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    shard, num_shards, placement, total = {}, 0, {}, 0

    def flush() -> None:
        nonlocal shard, num_shards
        if writes and shard:
            save_file(shard, partial / f"part-{num_shards}.safetensors", metadata={"format": "pt"})
        shard, num_shards = {}, num_shards + 1

    for name, tensor in hf_tensors(model, dtype):
        if not writes:
            continue
        shard[name] = tensor.cpu().contiguous()
        placement[name], total = num_shards, total + tensor.nbytes
        if sum(t.nbytes for t in shard.values()) >= EXPORT_SHARD_BYTES:
            flush()
    if not writes:
        return
    if shard:
        flush()

    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    names = ["model.safetensors"] if num_shards == 1 else names
    for index, name in enumerate(names):
        (partial / f"part-{index}.safetensors").rename(partial / name)
    if num_shards > 1:
        weight_map = {tensor: names[index] for tensor, index in placement.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    source = pathlib.Path(model.folder)
    for pattern in ("generation_config.json", *TOKENIZER_FILES):
        for file in source.glob(pattern):
            shutil.copy(file, partial)
    config = json.loads((source / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")} | {
        "dtype": str(dtype).removeprefix("torch.")
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
