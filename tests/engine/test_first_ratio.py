"""Before the first update the policy that trains is the policy that sampled: every ratio is 1."""

import pytest
import torch
from engine_cases import loss_function, make_engine, model_config, roll_out
from tiny_models import tiny_checkpoint


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_ratio_is_one_before_the_first_update(sde_type, lora, cfg):
    engine = make_engine(model_config(tiny_checkpoint(), sde_type, cfg, lora))
    data = roll_out(engine)
    assert data["old_log_probs"].abs().min() > 0
    engine.micro_batch_size = 5  # other batches than the rollout's
    with engine.train_mode():
        replayed = engine.infer_batch(data)["model_output"]["log_probs"].view_as(data["old_log_probs"])
        ratio = (replayed.double() - data["old_log_probs"].double()).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)
        first, second = (engine.train_batch(data, loss_function())["metrics"] for _ in range(2))
    assert first["ratio_max_dev"] <= 1e-6
    assert second["ratio_max_dev"] > 1e-4
