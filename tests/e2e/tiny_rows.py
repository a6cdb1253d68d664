"""The rows of the end-to-end tests: the first ones of the toy, which draws 50,000 in each start, for a second."""

from unittest import mock

from configs.examples import toys


def addition(split: str) -> list[dict[str, str]]:
    with mock.patch.dict(toys.NUM_ADDITIONS, {"train": 1000, "test": 100}):
        return toys.addition(split)
