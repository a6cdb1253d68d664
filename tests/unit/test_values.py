"""What a reward function may return, and what the supervisor takes from a worker."""

import decimal
import enum
import fractions
import json
import math

import numpy as np
import pytest
import torch

from grpo.rewards.workers.values import is_outcome, plain_values, read_reply


class LyingList(list):
    """Holds what list says, and tells something else."""

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([9.0])

    def __getitem__(self, index):
        return 9.0


class LyingFloat(float):
    def __float__(self):
        return 9.0

    __pos__ = __abs__ = __float__

    def __eq__(self, other):
        return True

    __hash__ = None


class LyingInt(int):
    def __float__(self):
        return 9.0

    __pos__ = __int__ = __index__ = __float__


class Impostor:
    """Says it is a list of floats."""

    __class__ = list

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([9.0])


class FloatImpostor:
    __class__ = float

    def __float__(self):
        return 9.0


class Unspeakable:
    def __repr__(self):
        raise KeyError("no words")


class Level(enum.IntEnum):
    HIGH = 2


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ([1.5, None, -0.0], [1.5, None, -0.0]),
        ((1, 2), [1.0, 2.0]),
        ([True, False], [1.0, 0.0]),
        ([2**53 + 1], [2.0**53]),
        ([fractions.Fraction(1, 4), decimal.Decimal("0.5")], [0.25, 0.5]),
        ([Level.HIGH], [2.0]),
        (LyingList([1.0, 2.0]), [1.0, 2.0]),
        ([LyingFloat(2.5)], [2.5]),
        ([LyingInt(3)], [3.0]),
        (np.array([0.5, 2.0]), [0.5, 2.0]),
        (np.array([1, 2], dtype=np.uint8), [1.0, 2.0]),
        (np.array([1.0, None], dtype=object), [1.0, None]),
        ([np.float64(0.5), np.float32(0.5), np.float16(0.5), np.longdouble(0.5)], [0.5] * 4),
        ([np.int64(3), np.bool_(True), None], [3.0, 1.0, None]),
        (torch.tensor([0.5, 2.0]), [0.5, 2.0]),
        (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
        ([torch.tensor(0.5), torch.tensor(True), torch.tensor(3)], [0.5, 1.0, 3.0]),
    ],
)
def test_what_is_a_number_becomes_a_float(values, plain):
    found = plain_values(values, len(plain))
    assert found == plain
    assert type(found) is list and all(value is None or type(value) is float for value in found)


@pytest.mark.parametrize(
    ("values", "failure"),
    [
        ([math.nan], r"nan (float), not a finite number or None"),
        ([math.inf], "inf (float), not a finite"),
        ([10**400], "0 (int), not a finite"),
        ([10**6000], "a value that cannot be shown (int), not a finite"),
        ([decimal.Decimal("1e999")], "Decimal('1E+999') (Decimal), not a finite"),
        ([decimal.Decimal("sNaN")], "Decimal('sNaN') (Decimal), not a finite"),
        ([fractions.Fraction(10**400)], "(Fraction), not a finite"),
        (["1"], "'1' (str), not a finite"),
        ([1j], "1j (complex), not a finite"),
        ([[1.0]], "[1.0] (list), not a finite"),
        ([FloatImpostor()], "(FloatImpostor), not a finite"),
        ([LyingFloat("nan")], "(LyingFloat), not a finite"),
        ([Unspeakable()], "a value that cannot be shown (Unspeakable), not a finite"),
        ([np.float32("inf")], "np.float32(inf) (float32), not a finite"),
        ([np.complex64(1)], "(complex64), not a finite"),
        ([np.datetime64(1, "ns")], "(datetime64), not a finite"),
        ([torch.tensor([1.0])], "tensor([1.]) (Tensor), not a finite"),
        ([torch.tensor(1 + 1j)], "(Tensor), not a finite"),
        (np.array([np.nan]), "(float64), not a finite"),
        (torch.tensor([math.inf]), "tensor(inf) (Tensor), not a finite"),
        ([1.0, 2.0], "returned 2 values for 1 completions"),
        ([], "returned 0 values for 1 completions"),
        (LyingList([1.0, 2.0]), "returned 2 values for 1 completions"),
        (torch.ones(2), "returned 2 values for 1 completions"),
        (np.ones((1, 1)), "(ndarray), not a list with 1 values"),
        (np.array(1.0), "(ndarray), not a list with 1 values"),
        (np.ma.array([1.0], mask=[True]), "(MaskedArray), not a list with 1 values"),
        (torch.tensor(1.0), "(Tensor), not a list with 1 values"),
        (Impostor(), "(Impostor), not a list with 1 values"),
        (None, "None (NoneType), not a list with 1 values"),
        (1.0, "1.0 (float), not a list with 1 values"),
        ("1", "'1' (str), not a list with 1 values"),
        ({0: 1.0}, "(dict), not a list with 1 values"),
        ({1.0}, "(set), not a list with 1 values"),
        (Unspeakable(), "a value that cannot be shown (Unspeakable), not a list with 1 values"),
    ],
)
def test_what_is_none_is_a_failure_that_says_what_came(values, failure):
    found = plain_values(values, 1)
    assert isinstance(found, str) and failure in found


def test_a_value_is_shown_in_part():
    assert len(plain_values(["x" * 10**6], 1)) < 700


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"call": 0, "outcome": [1.0]}', {"call": 0, "outcome": [1.0]}),
        (b"[1]", None),
        (b"{half", None),
        (b"", None),
        (b"\xff", None),
        (b'{"outcome": [NaN]}', None),
        (b'{"outcome": [-Infinity]}', None),
        (b"[" * 10**5, None),
        (b'{"call": ' + b"9" * 5000 + b"}", None),
    ],
)
def test_a_message_is_one_json_object(line, message):
    assert read_reply(line) == message


@pytest.mark.parametrize("text", ["[1.0, null]", "[0.5, -3.0]", '"took too long"'])
def test_an_outcome_is_as_many_floats_or_a_failure(text):
    assert is_outcome(json.loads(text), 2)


@pytest.mark.parametrize(
    "text",
    ["[1.0]", "[]", "[1.0, 2.0, 3.0]", "[1, 2]", "[true, 1.0]", "[1e999, 1.0]", '["1.0", 1.0]', "null", "1.0", "{}"],
)
def test_what_is_no_outcome(text):
    assert not is_outcome(json.loads(text), 2)
