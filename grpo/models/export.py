"""The weights of a sharded model under HF names, one by one or as a Hugging Face folder; adapters as a PEFT folder."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo.models.build import ShardedModel
from grpo.models.experts import by_expert
from grpo.models.hf_folder import (
    ChatForm,
    carried_tensors,
    copied_files,
    name_and_revision,
    open_tokenizer,
    served_end_ids,
    stop_token_ids,
)
from grpo.models.lora import LoRALinear, adapted_layers, merged_weight

EXPORT_SHARD_BYTES = 4 * 2**30


def hf_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, full tensor in `dtype`) one by one, so that a rank never holds the whole model.

    Each tensor has its own memory. Tied embeddings yield no lm_head.weight. With LoRA a weight comes merged with its
    adapter. Collective over the role's ranks, all of which iterate in lock step to the end.
    """
    for stacked_name, weight in stacked_tensors(model, dtype):
        for name, matrix in by_expert(stacked_name, weight):
            yield name, matrix.clone() if "*" in stacked_name else matrix


def stacked_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield as `hf_tensors`, but the experts of a layer as one tensor, whose name has a * for an expert's number."""
    for name, weight in _hf_weights(model).items():
        yield name, _gathered(weight, dtype)


def _gathered(weight: Tensor | LoRALinear, dtype: torch.dtype) -> Tensor:
    """Return the full tensor of a shard, or of a layer with its adapter, in memory of its own. Collective."""
    if isinstance(weight, LoRALinear):
        weight = merged_weight(weight, dtype)
    else:  # cast before it is gathered, which halves the traffic of bfloat16
        if isinstance(weight, DTensor) and weight.device_mesh.size() == 1:
            weight = weight.to_local()
        weight = weight.detach().to(dtype, copy=True)
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    # rows that the ranks do not divide are a view of padded memory, which cannot be saved
    if weight.nbytes != weight.untyped_storage().nbytes():
        weight = weight.clone()
    return weight


def stacked_shapes(model: ShardedModel) -> dict[str, torch.Size]:
    """Return the shapes of what `stacked_tensors` yields, by name, in the same order. Not collective."""
    weights = _hf_weights(model).items()
    return {name: (weight.weight if isinstance(weight, LoRALinear) else weight).shape for name, weight in weights}


def _hf_weights(model: ShardedModel) -> dict[str, Tensor | LoRALinear]:
    """Return this rank's shards under HF names; for a weight with an adapter the layer, which has both."""
    layers = {f"{layer.name}.weight": layer for layer in adapted_layers(model.module)}
    return model.names.to_hf(model.module.state_dict() | layers)


def export_hf(
    model: ShardedModel,
    target: pathlib.Path,
    dtype: torch.dtype,
    form: ChatForm | None = None,
) -> None:
    """Write a folder that `from_pretrained` and vLLM load; with LoRA the adapters too, at `adapters_folder`.

    The tokenizer's files come from the folder that training started from; `form` adds to them. Collective over the
    role's ranks; its rank 0 writes, and holds the whole model in host memory meanwhile.
    """
    if adapted_layers(model.module):
        export_adapters(model, adapters_folder(target))
    writes = dist.get_rank() == 0
    tensors = {name: tensor.cpu() for name, tensor in hf_tensors(model, dtype) if writes}
    if not writes:
        return
    tensors |= carried_tensors(model.folder)
    with _written_whole(target) as folder:
        save_torch_state_dict(tensors, folder, max_shard_size=EXPORT_SHARD_BYTES)
        source = pathlib.Path(model.folder)
        for file in copied_files(source):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        config = json.loads((source / "config.json").read_text())
        for table in (config, config.get("text_config", config)):
            table["dtype"] = str(dtype).removeprefix("torch.")
            table["torch_dtype"] = table["dtype"]  # all that transformers before 4.56 reads
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        if form is not None:
            write_form(folder, form)


def write_form(folder: pathlib.Path, form: ChatForm) -> None:
    """Write the form's template into a model folder, and all ends of replies into its generation_config.json.

    transformers reads the ends there alone: at a tokenizer's EOS that is not among them, replies would go on.
    """
    if form.template:
        (folder / "chat_template.jinja").write_text(form.template)  # it overrides the one in tokenizer_config.json
    tokenizer = open_tokenizer(str(folder))
    end_token_ids = {*stop_token_ids(str(folder), tokenizer), *form.end_token_ids}
    if not served_end_ids(folder).issuperset(end_token_ids):
        path = folder / "generation_config.json"
        options = json.loads(path.read_text()) if path.is_file() else {}
        options.pop("_from_model_config", None)  # it is no longer what config.json says
        options["eos_token_id"] = sorted(end_token_ids)
        path.write_text(json.dumps(options, indent=2))


def adapters_folder(target: pathlib.Path) -> pathlib.Path:
    """Return the adapters' folder of an exported folder. In it, transformers would add them to the merged weights."""
    return target.with_name(target.name + "-adapter")


def export_adapters(model: ShardedModel, target: pathlib.Path) -> None:
    """Write the adapters as a folder that PEFT loads on top of the base. Collective as `export_hf`."""
    layers = {f"{layer.name}.weight": layer for layer in adapted_layers(model.module)}
    tensors = {}
    for name, layer in model.names.to_hf(layers).items():
        for matrix, weight in (("A", layer.lora_a), ("B", layer.lora_b)):
            linear = name.removesuffix(".weight")
            tensors[f"base_model.model.{linear}.lora_{matrix}.weight"] = _gathered(weight, torch.float32).cpu()
    if dist.get_rank() != 0:
        return
    layer = adapted_layers(model.module)[0]
    rank = len(layer.lora_a)
    base, revision = name_and_revision(model.name)
    targets = {name.split(".")[-3] for name in tensors}  # of `....q_proj.lora_A.weight`
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": rank,
        "lora_alpha": layer.scale * rank,
        "target_modules": sorted(targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with _written_whole(target) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


@contextlib.contextmanager
def _written_whole(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give a `with` block an empty folder to fill. Afterwards it replaces `target`."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.glob("*.safetensors"):  # safetensors makes them unreadable for others, who may serve the model
        file.chmod(partial.stat().st_mode & 0o666)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
