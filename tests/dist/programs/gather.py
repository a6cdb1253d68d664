"""Gathered buckets against DTensor's own full tensors, bit by bit.

Arguments: FOLDER,TENSOR_PARALLEL,REPLICAS,LORA_RANK of each case.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.buckets import WeightBuckets, whole_tensors
from grpo.models.build import ShardedModel, build_model
from grpo.models.lora import adapted_layers, merged_weight
from grpo.roles.process_groups import Roles, setup_trainers

# Bytes of a bucket: single rows, parts of a tensor, several tensors and the whole model
BUCKETS = (1, 20_000, 2**28)


def main() -> None:
    roles = setup_trainers()
    for case in sys.argv[1:]:
        check_case(case, roles)
    dist.destroy_process_group()


def check_case(case: str, roles: Roles) -> None:
    """One model in one sharding. Collective over all ranks."""
    folder, tensor_parallel, replicas, lora_rank = case.split(",")
    trainer = TrainerConfig(
        tensor_parallel=int(tensor_parallel), data_replicas=int(replicas), lora_rank=int(lora_rank), compile=False
    )
    model = build_model(
        ModelConfig(dtype="float32"), trainer, folder, device=roles.device, tensor_parallel=trainer.tensor_parallel
    )
    for layer in adapted_layers(model.module):
        torch.nn.init.ones_(local(layer.lora_b))  # starts at 0, where a lost adapter would not show
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        wanted = full_tensors(model, dtype)
        for bucket_bytes in BUCKETS:
            weights = WeightBuckets(model, dtype, bucket_bytes)
            tensors = dict(whole_tensors(weights.bucket_map, weights.fill, roles.device))
            assert list(tensors) == list(wanted), f"{case}: {tensors.keys() ^ wanted.keys()}"
            for name, tensor in tensors.items():
                assert torch.equal(tensor, wanted[name]), f"{case}: {name}, {dtype}, buckets of {bucket_bytes} bytes"
            found.append(len(weights.bucket_map.buckets))
    assert found[0] > found[1] > found[2] == 1, found
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{pathlib.Path(case).name} on {ranks} ranks: {len(wanted)} tensors in {found} buckets", flush=True)


def full_tensors(model: ShardedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights under HF names, tensor by tensor. Collective over all ranks."""
    merged = {f"{layer.name}.weight": merged_weight(layer, dtype) for layer in adapted_layers(model.module)}
    shards = model.names.to_hf(model.module.state_dict() | merged)
    return {name: whole(shard.detach().to(dtype)) for name, shard in shards.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


if __name__ == "__main__":
    main()
