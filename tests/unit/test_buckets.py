"""Weights in flat buckets: where every block lies, by hand, and full tensors out of them."""

import pytest
import torch

from grpo.models.buckets import BUFFERS, Bucket, BucketMap, Piece, in_pipeline, whole_tensors

LAYOUT = BucketMap(
    torch.float32,
    {"a": (2, 3), "b": (2,)},
    (
        Bucket(6, (Piece("a", 0, (0, 0), (1, 3)), Piece("b", 4, (1,), (1,)))),
        Bucket(5, (Piece("a", 1, (1, 0), (1, 3)), Piece("b", 0, (0,), (1,)))),
    ),
)
BUCKETS = [torch.tensor([1.0, 2, 3, -1, 9, -1]), torch.tensor([8.0, 4, 5, 6, -1])]


def test_full_tensors_come_when_their_last_block_is_there():
    found = list(whole_tensors(LAYOUT, lambda index, bucket: bucket.copy_(BUCKETS[index]), torch.device("cpu")))
    assert [(name, tensor.tolist()) for name, tensor in found] == [("a", [[1, 2, 3], [4, 5, 6]]), ("b", [8, 9])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_no_stage_on_a_gpu_sees_a_bucket_too_early_or_overwritten(slow):
    buckets = 5 * BUFFERS
    bucket_map = BucketMap(torch.float32, {}, (Bucket(1000, ()),) * buckets)
    seen = torch.full((2, buckets, 1000), torch.nan, device="cuda")

    def stage(number):
        def run(index, bucket):
            if number == slow:
                torch.cuda._sleep(10_000_000)  # some milliseconds
            bucket.fill_(index) if number == 0 else seen[number - 1, index].copy_(bucket)

        return run

    in_pipeline([stage(0), stage(1), stage(2)], bucket_map, torch.device("cuda"))
    assert torch.equal(seen, torch.arange(buckets, device="cuda", dtype=torch.float32)[:, None].expand(2, -1, 1000))
