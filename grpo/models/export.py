"""Weights out of a sharded model under HF names: one by one, or as a Hugging Face folder; adapters as a PEFT folder."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from grpo.models.build import ShardedModel
from grpo.models.experts import by_expert
from grpo.models.hf_folder import ChatForm, copied_files, open_tokenizer, stop_token_ids
from grpo.models.lora import LoRALinear, adapted_layers, merged_weight

EXPORT_SHARD_BYTES = 4 * 2**30


def hf_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor in `dtype`, with memory of its own), one by one: the whole model never lies here.

    Tied embeddings yield no lm_head.weight. With LoRA, a weight comes merged with its adapter. Collective over the
    role's ranks: all iterate in lock step, and to the end.
    """
    for name, weight in stacked_tensors(model, dtype):
        for own_name, part in by_expert(name, weight):
            yield own_name, part.clone() if "*" in name else part


def stacked_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """`hf_tensors` with the experts of a layer as one tensor, whose name has a * for an expert's number."""
    for name, weight in _hf_weights(model).items():
        if isinstance(weight, LoRALinear):
            weight = merged_weight(weight, dtype)
        else:  # cast before it is gathered, which halves the traffic of bfloat16
            alone = isinstance(weight, DTensor) and weight.device_mesh.size() == 1
            weight = (weight.to_local() if alone else weight).detach().to(dtype, copy=True)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        # gathered rows that do not divide by the ranks are a view of padded memory, which cannot be saved
        yield name, whole if whole.nbytes == whole.untyped_storage().nbytes() else whole.clone()


def stacked_shapes(model: ShardedModel) -> dict[str, torch.Size]:
    """Shapes of what `stacked_tensors` yields, by name, in their order. Not collective."""
    weights = _hf_weights(model).items()
    return {name: (weight.weight if isinstance(weight, LoRALinear) else weight).shape for name, weight in weights}


def _hf_weights(model: ShardedModel) -> dict[str, torch.Tensor | LoRALinear]:
    """This rank's shards under HF names; for a weight with an adapter the layer, which has both."""
    layers = {f"{layer.name}.weight": layer for layer in adapted_layers(model.module)}
    return model.names.to_hf(model.module.state_dict() | layers)


def export_hf(model: ShardedModel, target: pathlib.Path, dtype: torch.dtype, form: ChatForm | None = None) -> None:
    """Write a folder that `from_pretrained` and vLLM load, and of LoRA the adapters beside it, at `adapters_beside`.

    The tokenizer's files are those of the folder that training started from, except for what `form` adds. Collective
    over the role's ranks; its rank 0 writes, and holds the whole model in host memory meanwhile.
    """
    if adapted_layers(model.module):
        export_adapters(model, adapters_beside(target))
    writes = dist.get_rank() == 0
    tensors = {name: tensor.cpu() for name, tensor in hf_tensors(model, dtype) if writes}
    if not writes:
        return
    with _written_whole(target) as folder:
        save_torch_state_dict(tensors, folder, max_shard_size=EXPORT_SHARD_BYTES)
        source = pathlib.Path(model.folder)
        for file in copied_files(source):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        config = json.loads((source / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        config["torch_dtype"] = config["dtype"]  # all that transformers before 4.56 reads
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        if form is not None:
            write_form(folder, form)


def write_form(folder: pathlib.Path, form: ChatForm) -> None:
    """Put the form's template into a model folder, and its ends of answers into the folder's generation_config.json."""
    if form.template:
        (folder / "chat_template.jinja").write_text(form.template)  # goes before that of tokenizer_config.json
    tokenizer = open_tokenizer(str(folder))
    before = stop_token_ids(str(folder), tokenizer)
    if not set(form.end_token_ids) <= set(before):
        path = folder / "generation_config.json"
        there = json.loads(path.read_text()) if path.is_file() else {}
        there.pop("_from_model_config", None)  # it is no longer what config.json says
        path.write_text(json.dumps(there | {"eos_token_id": sorted({*before, *form.end_token_ids})}, indent=2))


def adapters_beside(target: pathlib.Path) -> pathlib.Path:
    """Where the adapters of an exported folder go. Not into it: transformers would add them to the merged weights."""
    return target.with_name(target.name + "-adapter")


def export_adapters(model: ShardedModel, target: pathlib.Path) -> None:
    """Write the adapters as a folder that PEFT loads on top of the base. As `export_hf`, otherwise."""
    layers, tensors, targets = adapted_layers(model.module), {}, set()
    for layer in layers:
        (name,) = model.names.to_hf({f"{layer.name}.weight": None})
        name = name.removesuffix(".weight")
        targets.add(name.rpartition(".")[2])
        for ending, value in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
            whole = value.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            tensors[f"base_model.model.{name}.{ending}.weight"] = whole.cpu()
    if dist.get_rank() != 0:
        return
    rank = len(layers[0].lora_a)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": layers[0].scale * rank,
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
    """An empty folder to fill, which then takes the place and name of `target`."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
