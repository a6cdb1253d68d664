"""What several unit tests need."""

import pytest


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A default process group of this process alone, for what is collective."""
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
