"""The losses of a tokens segment, against the formulas written out token by token."""

import math

import pytest
import torch

from verl_omni.algorithms.token_loss import CLIP, TokenLoss, token_objective

OLD = [[-1.0, -2.0, -0.5], [-0.3, -3.0]]
NEW = [[-0.7, -2.4, -0.5], [-0.2, -2.0]]
ADVANTAGES = [0.8, -1.5]


def columns(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([row + [math.nan] * (3 - len(row)) for row in rows])


MASK = ~columns(OLD).isnan()


def by_hand(kind: str, below: float, above: float) -> float:
    total = 0.0
    for new, old, a in zip(NEW, OLD, ADVANTAGES, strict=True):
        change = [n - o for n, o in zip(new, old, strict=True)]
        if kind == "gspo":
            change = [sum(change) / len(change)]
        ratios = [math.exp(c) for c in change]
        total += sum(max(-a * r, -a * min(max(r, 1 - below), 1 + above)) for r in ratios) / len(ratios)
    return total / 2


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("clip", [(0.05, 0.05), (0.2, 0.2), (0.05, 0.4), (0.4, 0.05), (3.0, 3.0)])
def test_objective(kind, clip):
    loss, metrics = token_objective(kind, columns(NEW), columns(OLD), MASK, torch.tensor(ADVANTAGES), clip)
    assert loss.item() == pytest.approx(by_hand(kind, *clip), rel=1e-6)
    assert (metrics["clipfrac"] == 0) == (clip == (3.0, 3.0))


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_padding_has_no_gradient_and_texts_count_the_same(kind):
    new = columns(NEW).nan_to_num(0.0).requires_grad_()
    token_objective(kind, new, columns(OLD).nan_to_num(0.0), MASK, torch.ones(2), (10.0, 10.0))[0].backward()
    assert new.grad[1, 2] == 0 and (new.grad[MASK] != 0).all()
    same = columns(OLD).nan_to_num(0.0).requires_grad_()
    token_objective(kind, same, same.detach(), MASK, torch.ones(2), (0.2, 0.2))[0].backward()
    assert same.grad.sum(1).tolist() == pytest.approx([-0.5, -0.5])  # a text of two tokens as much as one of three


def test_each_loss_has_a_clip_range_of_its_own():
    """GSPO's is that of its paper's section 5.1; there a mean change of half a thousandth is clipped."""
    assert CLIP == {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
    old = columns(OLD).nan_to_num(0.0)
    data = {"text_old_log_probs": old, "text_log_probs": old, "text_mask": MASK, "advantages": torch.tensor([1.0, 1.0])}
    for kind, clip_ratio, clipped in (("gspo", None, 1), ("gspo", 0.2, 0), ("grpo", None, 0), ("grpo", 3e-4, 1)):
        result = TokenLoss(kind, clip_ratio, adv_clip_max=5.0)({"log_probs": old + 5e-4, "entropy": old}, data)
        assert result.metrics["clipfrac"] == clipped, (kind, clip_ratio)


def test_advantages_are_clamped_and_the_rollout_is_compared():
    data = {
        "text_old_log_probs": columns(OLD).nan_to_num(0.0),
        "text_log_probs": columns(OLD).nan_to_num(0.0) + 0.1,
        "text_mask": MASK,
        "advantages": torch.tensor([9.0, 0.0]),
    }
    output = {"log_probs": columns(OLD).nan_to_num(0.0), "entropy": torch.ones(2, 3)}
    result = TokenLoss("grpo", 0.2, adv_clip_max=5.0)(output, data)
    assert result.loss.item() == pytest.approx(-2.5)
    assert result.metrics["rollout_ratio_max_dev"].item() == pytest.approx(1 - math.exp(-0.1), rel=1e-5)
    assert result.metrics["length"].item() == 2.5
