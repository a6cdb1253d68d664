"""Weights in flat buckets: where every block lies, by hand, and full tensors out of them."""

import pytest
import torch

from grpo.models.buckets import BUFFERS, Bucket, BucketMap, Piece, in_pipeline, whole_tensors
from grpo.models.gather import _bucket, _slots

NAMES = ("a", "b", "c")
# over two shards: a [3, 4] in rows 2 + 1, b [5] in 3 + 2, c [2] on the first alone, as a copy lies on the second
BLOCKS = [
    [((0, 0), (2, 4)), ((2, 0), (1, 4))],
    [((0,), (3,)), ((3,), (2,))],
    [((0,), (2,)), None],
]


def test_a_bucket_lies_shard_after_shard_with_every_stretch_aligned():
    (slots,) = _slots(BLOCKS, 1000)
    # each shard's part: a at 0, b at 64, c at 128, 192 in all
    assert _bucket(slots, NAMES, BLOCKS) == Bucket(
        384,
        (
            Piece("a", 0, (0, 0), (2, 4)),
            Piece("a", 192, (2, 0), (1, 4)),
            Piece("b", 64, (0,), (3,)),
            Piece("b", 256, (3,), (2,)),
            Piece("c", 128, (0,), (2,)),
        ),
    )


def test_tensors_are_split_by_rows_where_a_bucket_is_full():
    # 68 elements of each shard: a's rows of 4 leave room for 4 elements behind their 64
    first, second = (_bucket(slots, NAMES, BLOCKS) for slots in _slots(BLOCKS, 68))
    assert [piece.name for piece in first.pieces] == ["a", "a", "b", "b"]
    assert second == Bucket(128, (Piece("c", 0, (0,), (2,)),))
    # 4: a row of a at a time; the second shard has no other row
    rows = [_bucket(slots, NAMES, BLOCKS) for slots in _slots(BLOCKS[:1], 4)]
    assert rows == [
        Bucket(128, (Piece("a", 0, (0, 0), (1, 4)), Piece("a", 64, (2, 0), (1, 4)))),
        Bucket(128, (Piece("a", 0, (1, 0), (1, 4)),)),
    ]


def test_a_row_larger_than_a_bucket_gets_a_bucket_of_its_own():
    assert [bucket.numel for slots in _slots(BLOCKS[:1], 1) for bucket in [_bucket(slots, NAMES, BLOCKS)]] == [128, 128]


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


def test_every_bucket_passes_the_stages_in_order():
    calls = []

    def fill(index, bucket):
        bucket.fill_(index)
        calls.append(("fill", index, len(bucket)))

    def load(index, bucket):
        calls.append(("load", index, bucket.tolist()))

    in_pipeline([fill, load], LAYOUT, torch.device("cpu"))
    assert calls == [("fill", 0, 6), ("load", 0, [0] * 6), ("fill", 1, 5), ("load", 1, [1] * 5)]


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
