"""Weights out of a sharded model under HF names: one by one, or as a Hugging Face folder."""

import json
import pathlib
import shutil
from collections.abc import Iterator

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor

from grpo.models.build import ShardedModel
from grpo.models.hf_folder import copied_files

EXPORT_SHARD_BYTES = 4 * 2**30


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
    """Write a folder that `from_pretrained` and vLLM load. Collective over the role's ranks; its rank 0 writes.

    Rank 0 holds the whole model in host memory meanwhile.
    """
    writes = dist.get_rank() == 0
    tensors = {name: tensor.cpu() for name, tensor in hf_tensors(model, dtype) if writes}
    if not writes:
        return
    target = pathlib.Path(target)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_torch_state_dict(tensors, partial, max_shard_size=EXPORT_SHARD_BYTES)
    source = pathlib.Path(model.folder)
    for file in copied_files(source):
        shutil.copyfile(file, partial / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of the same
    config["dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
