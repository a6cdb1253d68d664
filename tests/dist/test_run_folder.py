"""A run folder on a disk that only one node sees is refused before the first step, not found out by a resume."""

from tests.torchrun import torchrun


def test_a_run_folder_that_a_rank_does_not_see_is_refused_on_all_ranks(tmp_path):
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    output = torchrun("tests.dist.programs.run_folder", *folders, nproc=2)
    for rank in range(2):
        assert f"rank {rank}, one disk: taken" in output
        assert f"rank {rank}, two disks: 1 of 2 trainer ranks do not see " in output
