"""What a model's own loading does with each weight, learned by watching it; with stand-ins for an engine's model."""

import pytest
import torch
from torch import nn

from grpo.models.buckets import Bucket, BucketMap, Piece
from grpo.roles.engine_weights import EngineWeights, NotCopies, load_and_learn

LAYOUT = BucketMap(
    torch.float32,
    {"q": (2, 3), "k": (1, 3), "norm": (3,)},
    (
        Bucket(9, (Piece("q", 2, (0, 1), (2, 2)), Piece("norm", 6, (0,), (3,)))),
        Bucket(6, (Piece("k", 0, (0, 0), (1, 3)), Piece("q", 4, (0, 0), (2, 1)))),
    ),
)
Q, K, NORM = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[7.0, 8, 9]]), torch.tensor([10.0, 11, 12])
X = torch.nan
BUCKETS = [torch.tensor([X, X, 2, 3, 5, 6, 10, 11, 12]), torch.tensor([7.0, 8, 9, X, 1, 4])]


class Engine(nn.Module):
    """The last two columns of q and k stacked, as a rank's part of them; a row of padding; and a norm."""

    def __init__(self, change=lambda weight: weight, norm_size=3):
        super().__init__()
        self.qk = nn.Parameter(torch.full((4, 2), 100.0))
        self.norm = nn.Parameter(torch.full((norm_size,), 100.0))
        self.change = change

    def load_weights(self, weights):
        self.qk.data[3:].fill_(0)
        places = {"q": self.qk.data[:2], "k": self.qk.data[2:3], "norm": self.norm.data[:3]}
        for name, weight in weights:
            places[name].copy_(self.change(weight if name == "norm" else weight.narrow(1, 1, 2)))


def zeros():
    return iter([(name, torch.zeros(shape)) for name, shape in LAYOUT.shapes.items()])


def test_buckets_are_copied_to_where_loading_puts_weights(capsys):
    engine = Engine()
    learned = load_and_learn(engine, LAYOUT, zeros())
    engine.qk.data.fill_(X)
    for index, bucket in enumerate(BUCKETS):
        learned.load(index, torch.cat([torch.full((5,), X), bucket])[5:])  # in the middle of other memory
    assert engine.qk.tolist() == [[2, 3], [5, 6], [8, 9], [0, 0]]
    assert engine.norm.tolist() == [10, 11, 12]
    assert all(learned.holds(name, weight) for name, weight in (("q", Q), ("k", K), ("norm", NORM)))
    other = Q.clone()
    other[1, 2] += 1
    assert not learned.holds("q", other)
    other = Q.clone()
    other[1, 0] += 1  # a column that this rank does not have
    assert learned.holds("q", other)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "engine, reason",
    [
        (Engine(lambda weight: weight * 2), "mul.Tensor is done with a weight"),
        (Engine(lambda weight: weight.contiguous()), "clone.default is done with a weight"),
        (Engine(lambda weight: weight.t() if weight.shape == (2, 2) else weight), "q: it is copied in another shape"),
        (Engine(norm_size=5), "11 elements are written, where parameters have 13"),
    ],
    ids=["scaled", "made contiguous", "transposed", "more than is loaded"],
)
def test_loading_that_is_not_plain_copies_stays_in_use(engine, reason, capsys):
    with pytest.raises(NotCopies, match=reason):
        EngineWeights(engine, LAYOUT)
    assert load_and_learn(engine, LAYOUT, iter([("q", Q), ("k", K), ("norm", NORM)])) is None
    assert reason in capsys.readouterr().out
    assert engine.norm[:3].tolist() in ([10, 11, 12], [20, 22, 24])


def test_a_weight_that_is_elsewhere_after_the_load_ends_the_copying(capsys):
    class Late(Engine):
        """Takes all weights before it loads one, so that none is in place when the next one is asked for."""

        def load_weights(self, weights):
            super().load_weights(list(weights))

    assert load_and_learn(Late(), LAYOUT, iter([("q", Q), ("k", K), ("norm", NORM)])) is None
    assert "3 of 3 tensors are not where expected, q first" in capsys.readouterr().out
