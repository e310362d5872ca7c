"""Where old log-probabilities come from is one choice, which says why and is in the metrics."""

import json
import subprocess
import sys

import pytest
from e2e_runs import metrics, settings

from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.workers.old_log_probs import SOURCES, choose_old_log_probs

REWARD = """
def compute_score(image):
    return image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255
"""


@pytest.mark.parametrize(
    ("setting", "same_arithmetic", "same_weights", "source", "why"),
    [
        (None, True, True, "rollout", "same arithmetic"),
        (None, False, True, "train", "round differently"),
        (None, True, False, "rollout", "earlier weights drew"),
        (None, False, False, "recompute", "in kernels that round differently"),
        ("rollout", False, False, "rollout", "old_log_probs=rollout"),
        ("recompute", True, True, "recompute", "old_log_probs=recompute"),
    ],
)
def test_the_choice_says_why(setting, same_arithmetic, same_weights, source, why):
    chosen = choose_old_log_probs(setting, same_arithmetic, same_weights)
    assert chosen.source == source and why in chosen.why


@pytest.fixture(scope="module")
def found(tmp_path_factory, process_group):
    """Two steps of two optimizer steps each, in float32 on a CPU, by source; null is the first."""
    runs = {}
    for source in (None, *SOURCES):
        folder = tmp_path_factory.mktemp(str(source))
        (folder / "reward.py").write_text(REWARD)
        given = [f"actor_rollout_ref.actor.old_log_probs={source}"] if source else []
        guard = ["actor_rollout_ref.model.algorithm=grpo_guard"]  # its loss asks for old means too
        reward = f"reward.custom_reward_function.path={folder}/reward.py"
        arguments = settings(folder / "run", reward, "trainer.total_training_steps=2", *guard, *given)
        local_trainer(local_config(arguments)).fit()
        runs[source] = metrics(folder / "run")
        passes = (folder / "run/metrics.jsonl").read_text().count("timing_s/old_log_prob")
        assert passes == (2 if source == "recompute" else 0)
    return runs


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_trains_alike(found, source):
    """In float32 on a CPU the three are the same numbers up to rounding."""
    for step in (1, 2):
        line, default = found[source][step], found[None][step]
        named = {name.removeprefix("actor/old_log_probs_from_") for name in line if "old_log_probs_from" in name}
        assert named == {source}
        assert line["actor/rollout_ratio_max_dev"] < 1e-6
        for name in ("actor/loss", "actor/grad_norm", "critic/rewards/mean"):
            assert line[name] == pytest.approx(default[name], rel=1e-3, abs=1e-6)


def test_the_default_is_the_rollouts_own(found):
    for step in (1, 2):
        ours, rollout = found[None][step], found["rollout"][step]
        assert ours == rollout


SETTINGS = {  # what is set, and whether a GPU then rounds alike
    "": True,
    "torch.set_float32_matmul_precision('high')": False,
    "torch.set_float32_matmul_precision('medium')": False,
    "torch.set_float32_matmul_precision('highest')": True,
    "torch.backends.cuda.matmul.allow_tf32 = True": False,
    "torch.backends.cuda.matmul.allow_tf32 = False": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": False,
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": True,
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'none'": False,
}


def test_a_gpu_that_may_take_tf32_rounds_otherwise_with_another_number_of_rows():
    """However it was told to, one after the other in a process of its own."""
    code = f"""
import json, torch
from verl_omni.workers.engine.module import rounds_alike
found = []
for said in {list(SETTINGS)}:
    exec(said)
    asked = [(torch.float32, "cuda"), (torch.float32, "cpu"), (torch.bfloat16, "cuda")]
    found.append([rounds_alike(dtype, False, False, torch.device(device)) for dtype, device in asked])
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[alike, True, False] for alike in SETTINGS.values()]
