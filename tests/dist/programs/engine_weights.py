"""Buckets copied straight into vLLM's modules give what vLLM's own loading gives. Arguments: FOLDER .. of models.

Every rank has its part of each model, by tensor parallelism over all ranks. The modules are vLLM's, unprocessed, as
they are on a GPU; a running CPU engine has repacked its weights.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from grpo.models.buckets import Bucket, BucketMap, Piece
from grpo.roles.engine_weights import EngineWeights, NotCopies, load_and_learn
from grpo.roles.process_groups import setup_trainers
from grpo.roles.shared_memory import remove_shared_memory, replica_name

EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


def main() -> None:
    setup_trainers()
    os.environ["VLLM_DIST_IDENT"] = f"env:{replica_name(0)}"  # of the memory that the ranks share
    ranks = dist.get_world_size()
    init_distributed_environment(backend="gloo")
    for number, folder in enumerate(sys.argv[1:]):
        config = EngineArgs(
            model=folder,
            dtype="bfloat16",
            tensor_parallel_size=ranks,
            enforce_eager=True,
            skip_tokenizer_init=True,
            config_format="hf",
        ).create_engine_config()
        with set_current_vllm_config(config):
            if number == 0:
                initialize_model_parallel(ranks, backend="gloo")
            check(config, folder)
    dist.barrier()
    remove_shared_memory()
    dist.destroy_process_group()


def check(config: VllmConfig, folder: str) -> None:
    """All of it for one model."""
    generator = torch.Generator().manual_seed(0)
    (file,) = pathlib.Path(folder).glob("model*.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    first, second = (
        {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()} for _ in range(2)
    )
    bucket_map, buckets = cut(second)
    model = filled(initialize_model(config))
    model.load_weights(iter(second.items()))
    wanted = {name: parameter.clone() for name, parameter in model.named_parameters()}

    live = load_and_learn(filled(model), bucket_map, iter(first.items()))
    assert live is not None, f"{folder}: vLLM's loading was not understood"
    assert all(live.holds(name, tensor) for name, tensor in first.items())
    for index, bucket in enumerate(buckets):
        live.load(index, bucket)
    assert all(live.holds(name, tensor) for name, tensor in second.items())
    stale = {name for name, tensor in first.items() if live.holds(name, tensor)}
    # vLLM pads these 32 tokens to 64, so that the second rank has none of them
    assert stale <= (set(EMBEDDINGS) if dist.get_rank() else set()), f"{folder}: {stale}"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), f"{folder}: {name}"

    refused = Doubling(model)
    try:
        EngineWeights(refused, bucket_map)
    except NotCopies as reason:
        assert "mul" in str(reason), reason
    else:
        raise AssertionError("a model that changes its weights while it loads them was taken for one that copies")
    assert load_and_learn(refused, bucket_map, iter(second.items())) is None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, 2 * wanted[name]), f"{folder}: {name}"
    if dist.get_rank() == 0:
        print(
            f"{folder}: {len(wanted)} parameters by {sum(len(b.pieces) for b in bucket_map.buckets)} pieces", flush=True
        )


class Doubling(nn.Module):
    """A model whose loading does more than to copy."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def load_weights(self, weights):
        return self.model.load_weights((name, tensor * 2) for name, tensor in weights)


def filled(model: nn.Module) -> nn.Module:
    """With a number everywhere that no weight has, padding of the vocabulary included."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1000)
    return model


def cut(tensors: dict[str, torch.Tensor], limit: int = 5000) -> tuple[BucketMap, list[torch.Tensor]]:
    """Tensors in blocks of uneven rows and columns, as buckets of about `limit` elements with gaps in between."""
    pieces, values, buckets, flat = [], [], [], []
    offset = 0
    for name, tensor in tensors.items():
        rows = tensor.shape[0]
        for r0, r1 in ((0, rows // 3), (rows // 3, rows - 1), (rows - 1, rows)):
            columns = [()] if tensor.ndim == 1 else [(0, 17), (17, tensor.shape[1])]
            for span in columns:
                block = tensor[r0:r1] if tensor.ndim == 1 else tensor[r0:r1, slice(*span)]
                start = (r0,) if tensor.ndim == 1 else (r0, span[0])
                pieces.append(Piece(name, offset, start, tuple(block.shape)))
                values += [block.flatten(), torch.full((7,), torch.nan, dtype=block.dtype)]
                offset += block.numel() + 7
                if offset > limit:
                    buckets.append(Bucket(offset, tuple(pieces)))
                    flat.append(torch.cat(values))
                    pieces, values, offset = [], [], 0
    if pieces:
        buckets.append(Bucket(offset, tuple(pieces)))
        flat.append(torch.cat(values))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return BucketMap(torch.bfloat16, shapes, tuple(buckets)), flat


if __name__ == "__main__":
    main()
