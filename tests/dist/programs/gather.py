"""Gathered tensors against the folder that was loaded; with LoRA against A and B gathered and merged by hand.

Arguments: FOLDER,TENSOR_PARALLEL,REPLICAS,LORA_RANK of each case.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.build import build_model
from grpo.models.export import hf_tensors, stacked_shapes, stacked_tensors
from grpo.models.lora import adapted_layers
from grpo.roles.process_groups import Roles, setup_trainers


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
    (file,) = pathlib.Path(folder).glob("model*.safetensors")
    wanted = load_file(file)
    for layer in adapted_layers(model.module):
        (name,) = model.names.to_hf({f"{layer.name}.weight": None})
        wanted[name] = torch.addmm(wanted[name], whole(layer.lora_b), whole(layer.lora_a), alpha=layer.scale)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = dict(hf_tensors(model, dtype))
        assert tensors.keys() == wanted.keys(), f"{case}: {tensors.keys() ^ wanted.keys()}"
        assert {name: tensor.shape for name, tensor in stacked_tensors(model, dtype)} == stacked_shapes(model), case
        for name, tensor in tensors.items():
            # a product of parts of the columns may round otherwise than one of all
            tolerance = 0 if lora_rank == "0" else 1e-6 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(tensor, wanted[name].to(dtype), rtol=tolerance, atol=tolerance)
    if dist.get_rank() == 0:
        print(f"{pathlib.Path(case).name} on {dist.get_world_size()} ranks: {len(wanted)} tensors", flush=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


if __name__ == "__main__":
    main()
