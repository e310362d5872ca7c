"""A model on tensors without memory decides by values that it was given, and by no others."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from verl_omni.perf.known_values import FEW, KnownValues

LENGTHS = [3, 5]
MASK = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


def test_what_is_computed_from_a_mask_is_known():
    mode = KnownValues()
    mask, features = mode.like(MASK), mode.like(torch.ones(2, 6, 4))
    with mode:
        assert mask.sum(dim=1).tolist() == LENGTHS and not mask.all()
        chosen = features[mask]
        assert isinstance(chosen, FakeTensor) and chosen.shape == (sum(LENGTHS), 4)
        image = torch.zeros(2, 3, dtype=mask.dtype)  # made inside, of nothing that is unknown
        assert torch.cat([mask, image], dim=1).sum().item() == sum(LENGTHS)
        image[0, :2] = True
        assert image.tolist() == [[True, True, False], [False] * 3]


def test_zeros_are_known_and_features_are_not():
    mode = KnownValues()
    absent, features = mode.like(torch.zeros(2, 4)), mode.like(torch.ones(2, 4))
    layer = torch.nn.Linear(4, 4)
    with mode:
        assert torch.all(absent == 0)
        for unknown in (features, layer(absent), absent + features):
            with pytest.raises(DataDependentOutputException):
                bool(torch.all(unknown == 0))


def test_what_is_written_over_is_known_no_more():
    mode = KnownValues()
    given = torch.zeros(4)
    absent, features = mode.like(given), mode.like(torch.ones(4))
    with mode:
        absent += features
        with pytest.raises(DataDependentOutputException):
            bool(torch.all(absent == 0))
    assert not given.any()


def test_a_picture_of_zeros_is_too_large_to_be_known():
    mode = KnownValues()
    picture = mode.like(torch.zeros(1).expand(FEW + 1))
    with mode, pytest.raises(DataDependentOutputException):
        bool(picture.any())
