"""Encoders are on the device when they are needed, and away when the policy says so; what they compute stays."""

import pytest
import torch

from verl_omni.workers.rollout.encoders import Encoders


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()


def rollout(encoders: Encoders, new_prompts: bool) -> tuple[bool, bool]:
    """Two batches; whether the encoders are on the device after each."""
    encoders.rollout_begins()
    seen = []
    for _ in range(2):
        if new_prompts:
            encoders.enter()
            assert encoders.present
        encoders.batch_encoded()
        seen.append(encoders.present)
    return tuple(seen)


@pytest.mark.parametrize(
    ("offload", "expected"),
    [(None, [True, True, False, True]), (True, [False] * 4), (False, [True] * 4)],
    ids=["auto", "always", "never"],
)
def test_when_they_leave(module, offload, expected):
    """New prompts in the first rollout and in the last; in the third the second had shown that none are left."""
    encoders = Encoders([module], torch.device("cpu"), offload)
    found = [rollout(encoders, new_prompts) for new_prompts in (True, False, False, True)]
    assert found == [(present, present) for present in expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (pytest -m gpu)")
def test_every_tensor_leaves_the_device(module):
    module.cuda()
    encoders = Encoders([module], torch.device("cuda"), True)
    before = module(torch.ones(2, 3, device="cuda"))
    for _ in range(2):
        encoders.batch_encoded()
        assert {t.device.type for t in module.state_dict().values()} == {"cpu"}
        assert all(p.is_pinned() for p in module.parameters())
        encoders.enter()
        assert {t.device.type for t in module.state_dict().values()} == {"cuda"}
    torch.testing.assert_close(module(torch.ones(2, 3, device="cuda")), before, rtol=0, atol=0)
