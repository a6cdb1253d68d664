"""Buckets of weights through several stages at once: while one is loaded, the next one is on its way."""

from collections.abc import Sequence

import torch

from grpo.models.buckets import BucketMap, Fill

# One for each of the two stages that a rank has at most
BUFFERS = 2


def in_pipeline(stages: Sequence[Fill], bucket_map: BucketMap, device: torch.device) -> None:
    """Run all stages on every bucket of the map, each after the one before it; return when all is done.

    On a GPU each stage has a stream of its own, so that it takes up a bucket while the next stage still has the one
    before; a buffer is filled again when the last stage is done with it. The memory is that of BUFFERS buckets. On a
    CPU it is a plain loop.
    """
    if device.type == "cpu":
        buffer = bucket_map.empty_bucket(device)
        for index, bucket in enumerate(bucket_map.buckets):
            for stage in stages:
                stage(index, buffer[: bucket.numel])
        return
    buffers = [bucket_map.empty_bucket(device) for _ in range(BUFFERS)]
    done = [torch.cuda.current_stream(device).record_event()] * BUFFERS  # the weights of an update are there
    streams = [torch.cuda.Stream(device) for _ in stages]
    for index, bucket in enumerate(bucket_map.buckets):
        event = done[index % BUFFERS]
        for stage, stream in zip(stages, streams, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(event)
                stage(index, buffers[index % BUFFERS][: bucket.numel])
                event = stream.record_event()
        done[index % BUFFERS] = event
    torch.cuda.synchronize(device)  # for whatever stream an engine computes on, and so that the time is a sync's own
