"""What a trainer's starts leave in its folder, with the workers left out."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from e2e_runs import settings
from hydra import compose, initialize_config_module
from verl.protocol import DataProto

from verl_omni.config import schema
from verl_omni.data.loading import load_datasets
from verl_omni.trainer.checks.preflight import preflight
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer

schema.register()


class Workers:
    """Writes a file where the real ones write the model's state."""

    world_size = 1

    def __init__(self):
        self.loaded = None

    def checkpoint_bytes(self):
        return [5]

    def save_checkpoint(self, folder, step):
        state = Path(folder, "state")
        state.mkdir()
        (state / "tensors.safetensors").write_text(f"of step {step}")

    def checkpoint_written(self, wait):
        return [True]

    def checkpoint_files(self, folder):
        return [{"state/tensors.safetensors": Path(folder, "state/tensors.safetensors").stat().st_size}]

    def load_checkpoint(self, folder):
        self.loaded = folder


class Trainer(BaseRayDiffusionTrainer):
    def changes(self):
        return [self.global_step]

    def training_step(self, pace, timing):
        if self.global_step + 1 == self.killed_at:
            raise KeyboardInterrupt
        self.seen.append(list(pace.prompts.take().non_tensor_batch["prompt"]))
        return DataProto.from_dict({}, {}), {"actor/grad_norm": 1.0}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Types the command: the trainer after its run."""
    module = "verl_omni.trainer.diffusion.after_step."
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: None))
    computed = ("compute_data_metrics_diffusion", "compute_timing_metrics_diffusion", "compute_mfu_metrics")
    for name in (*computed, "compute_throughput_metrics_diffusion", "reward_metrics", "write_training_samples"):
        monkeypatch.setattr(module + name, lambda *a: {})

    def typed(*overrides, killed_at=None):
        first = ("data.val_files=null", "trainer.save_freq=1", "trainer.device=cpu", "trainer.logger=[jsonl]")
        with initialize_config_module("verl_omni.trainer.config", version_base=None):
            config = preflight(compose("diffusion_trainer", settings(tmp_path / "run", *first, *overrides)))
        trainer = Trainer(config, None, {}, None, train_dataset=load_datasets(config)[0])
        trainer.actor_wg, trainer.seen, trainer.killed_at = Workers(), [], killed_at
        trainer.fit()
        return trainer

    return typed


def contents(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "report.html")


def test_starts_of_one_run_and_of_another(start, tmp_path):
    run, lr = tmp_path / "run", "actor_rollout_ref.actor.optim.lr"
    whole = start("trainer.total_training_steps=4", "trainer.default_local_dir=" + str(tmp_path / "whole"))

    first = start("trainer.total_training_steps=2")
    assert first.actor_wg.loaded is None
    assert (run / "latest_checkpointed_iteration.txt").read_text().split()[0] == "2"
    manifest = json.loads((run / "global_step_2/manifest.json").read_text())
    assert manifest["global_step"] == 2 and set(manifest["files"]) == {"trainer.json", "state/tensors.safetensors"}
    config = (run / "config.yaml").read_text()

    # The same run, longer and slower: the data goes on, and what changed is beside what was.
    second = start("trainer.total_training_steps=4", f"{lr}=0.5")
    assert second.actor_wg.loaded == str(run / "global_step_2")
    assert first.seen + second.seen == whole.seen and len({str(batch) for batch in whole.seen}) > 1
    assert (run / "config.yaml").read_text() == config
    assert "lr: 0.5" in (run / "config.step_2.yaml").read_text()
    steps = ["global_step_1", "global_step_2", "global_step_3", "global_step_4"]
    kept = ["latest_checkpointed_iteration.txt", "metrics.jsonl", "starts.jsonl"]
    assert contents(run) == ["config.step_2.yaml", "config.yaml", *steps, *kept]

    # Another run in the same folder, killed before its first checkpoint: the older one is put aside, whole.
    with pytest.raises(KeyboardInterrupt):
        start("trainer.resume_mode=disable", killed_at=1)
    earlier = run / "earlier_1"
    assert contents(earlier) == ["config.step_2.yaml", "config.yaml", *steps, *kept]
    assert contents(run) == ["config.yaml", "earlier_1", *kept]
    again = start("trainer.total_training_steps=1")
    assert again.actor_wg.loaded is None, "never from the older run"
    assert (run / "latest_checkpointed_iteration.txt").read_text().split()[0] == "1"


def test_data_of_another_order_starts_at_its_beginning_where_that_is_allowed(start, capsys):
    start("trainer.total_training_steps=2")
    second = start("trainer.total_training_steps=3", "data.seed=1", "trainer.resume_changes=allow")
    assert "The prompts start at the beginning of a new order: data.seed was 0 and is 1." in capsys.readouterr().out
    assert len(second.seen) == 1
