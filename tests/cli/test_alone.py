"""Whatever can be run can be checked and overfitted: settings of many devices have their like on one."""

import json
import sys

import pytest
from composed import composed
from recipe_inputs import composed_recipe
from tiny_runs import tiny_settings

from benchmarks.plan_recipes import OFFLINE
from verl_omni.cli import check, overfit, recipes
from verl_omni.cli.in_process import judge, prepared

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TWO = "trainer.n_gpus_per_node=2"
SHARED = [TWO, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"]
ASYNC = ["trainer.mode=fully_async", "rollout.n_gpus_per_node=1"]
SEPARATE = ["trainer.mode=separate", "rollout.n_gpus_per_node=1"]
CORRECTED = "algorithm.rollout_correction.rollout_is"
VALIDATED = ["data.val_files=prompts.txt", "trainer.test_freq=1", "trainer.save_freq=1"]
JUDGE = [
    "reward.custom_reward_function.path=null",
    "reward.reward_model.enable=true",
    "reward.reward_model.model_path=/m",
    "reward.scorers=[{name: vlm_judge}]",
]
SETTINGS = {
    "shards": [TWO, f"{ACTOR}.fsdp_config.fsdp_size=2"],
    "shared tokens": SHARED,
    "drawn together": [*SHARED, f"{ROLLOUT}.share_samples=true"],
    "block by block": [TWO, f"{ROLLOUT}.gather=blocks"],
    "weights of stale samples": [*ASYNC, f"{CORRECTED}=token", f"{CORRECTED}_threshold=3"],
    "stale samples turned away": [
        *ASYNC, "algorithm.rollout_correction.rollout_rs=step_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
    ],
    "stale samples kept": [*ASYNC, "trainer.stale_groups=keep", "trainer.max_staleness=3"],
    "asked over HTTP": [*SEPARATE, f"{ROLLOUT}.http.port=0", f"{ROLLOUT}.http.max_images=2"],
    "sent by gloo": [*SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=gloo"],
    "restarted servers": [*SEPARATE, f"{ROLLOUT}.server_restarts=1"],
    "compiled ahead": [f"{ACTOR}.engine.use_torch_compile=true", f"{ACTOR}.engine.compile_ahead=true"],
    "gone on from": ["trainer.resume_mode=resume_path", "trainer.resume_from_path=elsewhere/global_step_1"],
    "the best kept": ["trainer.keep_best=true", *VALIDATED],
    "only validated": ["trainer.val_only=true", *VALIDATED],
    "profiled": ["trainer.profile_step=40", "trainer.total_training_steps=50"],
    "judged": JUDGE,
    "validated otherwise": ["reward.validation.scorers=[{name: jpeg_incompressibility}]", *VALIDATED],
    "judged in validation": [
        *JUDGE[:3], "reward.validation.scorers=[{name: vlm_judge}]",
        "reward.scorers=[{name: jpeg_incompressibility}]", *VALIDATED,
    ],
    "two judges": [*JUDGE, "reward.reward_model.nnodes=2"],
    "compared": ["reward.pairwise.by=score", "reward.pairwise.opponents=1"],
    "filtered": ["algorithm.filter_groups.enable=true"],
    "ranked first": [f"{ROLLOUT}.pool.size=4", f"{ROLLOUT}.pool.num_inference_steps=2"],
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_what_can_be_run_can_be_tried_alone(here, more):
    config = composed(*tiny_settings(here), *more)
    run = prepared(config.copy())
    alone = [check.one_image(config, run), overfit.one_prompt(config, run, steps=2)[0]]
    for one in alone:
        actor = one.actor_rollout_ref.actor
        assert one.trainer.n_gpus_per_node == one.trainer.nnodes == 1 and one.actor_rollout_ref.hybrid_engine
        assert actor.fsdp_config.ulysses_sequence_parallel_size == 1
    assert [one.trainer.val_only for one in alone] == [True, False]


SMALL = [f"{ROLLOUT}.pipeline.{side}=32" for side in ("height", "width")]
ON_A_CPU = ["trainer.device=cpu", "trainer.n_gpus_per_node=1"]


@pytest.mark.parametrize("name", [name for name in recipes.shipped() if name != OFFLINE])
def test_a_shipped_recipe_can_be_tried_alone(here, monkeypatch, name):
    config = composed_recipe(name, monkeypatch, *ON_A_CPU, *([] if name.startswith("longcat") else SMALL))
    run = prepared(config.copy())
    if config.reward.pairwise.by == "pair":  # a check has one image, and says what to type
        with pytest.raises(ValueError, match="go on with `verl-omni overfit"):
            check.one_image(config, run)
    else:
        assert check.one_image(config, run).data.val_max_samples == 1
    assert overfit.one_prompt(config, run, steps=2)[0].data.train_batch_size == 1


JUDGES = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}}]}
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_check_starts_the_judge_and_ends_it(here, monkeypatch, capsys, process_group):
    (here / "judges.py").write_text(JUDGES)
    scorer = "reward.scorers=[{name: vlm_judge, template: '{prompt}?', parser: number, scale: 1..5}]"
    command = f'reward.reward_model.command="{sys.executable} {here}/judges.py {{port}}"'
    monkeypatch.setattr(sys, "argv", ["x", *tiny_settings(here), *JUDGE[:3], scorer, command])
    ended = []
    monkeypatch.setattr("verl_omni.rewards.judge.JudgeServer.stop", watched(ended))
    check.main()
    shown = capsys.readouterr().out
    assert "the judge, started ..." in shown and "Score:  0.7500" in shown  # 4 of 1 to 5
    (server,) = ended
    assert server.poll() is not None


def watched(ended):
    from verl_omni.rewards.judge import JudgeServer

    stop = JudgeServer.stop

    def stop_and_tell(server):
        stop(server)
        ended.append(server.process)

    return stop_and_tell


def test_a_judge_needs_a_gpu_beside_the_model(here, monkeypatch):
    """Where two GPUs are there it has the second one."""
    import torch

    from verl_omni.cli.in_process import devices_after_the_first

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="there are 1 here; try it on a machine that has 2"):
        devices_after_the_first(1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_after_the_first(2) == ["1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert devices_after_the_first(1) == ["5"]


def test_there_has_to_be_something_to_overfit(here):
    validates = ["trainer.val_only=true", "data.val_files=prompts.txt", "data.train_files=null"]
    config = composed(*tiny_settings(here), *validates)
    with pytest.raises(ValueError, match="overfit trains on its first prompt; name a file"):
        overfit.one_prompt(config, prepared(config.copy()), steps=2)


def test_without_a_judge_none_is_started(here):
    with judge(composed(*tiny_settings(here))) as address:
        assert address is None


@pytest.mark.parametrize("by, takes", [("pair", "image, other"), ("group", "images")])
def test_a_comparison_is_tried_by_overfit(here, by, takes):
    (here / "pairs.py").write_text(f"def compute_score({takes}):\n    return 0.5\n")
    own = "reward.custom_reward_function.path=pairs.py"
    config = composed(*tiny_settings(here), own, f"reward.pairwise.by={by}")
    run = prepared(config.copy())
    with pytest.raises(ValueError, match="`verl-omni overfit --steps 1`"):
        check.one_image(config, run)
    one, prompt = overfit.one_prompt(config, run, steps=1)
    assert one.reward.pairwise.by == by and json.loads((overfit.FOLDER / "prompt.jsonl").read_text())
    assert prompt == "a cat"


def test_a_row_keeps_its_size(here):
    (here / "sizes.jsonl").write_text('{"prompt": "a cat", "height": 64, "width": 48}\n')
    config = composed(*tiny_settings(here), "data.train_files=sizes.jsonl", "data.train_batch_size=1")
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    overfit.one_prompt(config, prepared(config.copy()), steps=1)
    row = json.loads((overfit.FOLDER / "prompt.jsonl").read_text())
    assert (row["height"], row["width"]) == (64, 48)
