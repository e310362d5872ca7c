"""Bad input costs seconds: one line that says what to type, before any worker starts."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composed import composed
from PIL import Image
from tiny_models import tiny_checkpoint

import verl_omni
from verl_omni.cli import train
from verl_omni.config.keys import with_plus
from verl_omni.pipelines.utils import diffusers_since
from verl_omni.rewards.choice import read_choices
from verl_omni.trainer import main_diffusion
from verl_omni.trainer.checks.preflight import check_data, preflight
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.checks.rewards import check_ground_truth, check_rewards
from verl_omni.trainer.failures import users_mistake
from verl_omni.utils.hub import HubError


def row(prompt: str = "a cat", source: str = "jpeg_compressibility", **more) -> dict:
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ""}} | more


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Files of prompts, good and bad."""
    folder = tmp_path_factory.mktemp("data")
    pq.write_table(pa.Table.from_pylist([row(f"a cat, number {i}") for i in range(8)]), folder / "good.parquet")
    files = {
        "good": [row(f"a cat, number {i}") for i in range(8)],
        "nameless": [{k: v for k, v in row().items() if k != "data_source"}] * 8,
        "misspelt": [{"promt": "a cat", **{k: v for k, v in row().items() if k != "prompt"}}],
        "alone": [{"prompt": "a cat"}] * 8,
        "without_truth": [row() | {"reward_model": {}}],
        "long": [row("a cat")] * 7 + [row("word " * 300)],
        "long_in_bytes": [row("a cat, " * 20)] * 30 + [row("猫" * 60)],
        "long_negative": [row()] * 7 + [row(negative_prompt="word " * 300)],
        "half": [row(), row("a \ud83d cat")],
        "half_truth": [row(reward_model={"ground_truth": "\ud83d"})],
        "other_reward": [row()] * 7 + [row(source="jpeg_compresibility")],
        "extra_text": [row()] * 7 + [row(extra_info="a text")],
        "agent_number": [row()] * 7 + [row(agent_name=7)],
        "other_agent": [row()] * 7 + [row(agent_name="diffusion_single_turn")],
        "no_image": [row()] * 7 + [row(images=["/no/such.png"])],
        "text_as_image": [row()] * 7 + [row(images=[str(folder / "prompts.txt")])],
        "images_number": [row()] * 7 + [row(images=3)],
        "nine_tokens": [row()] * 7 + [row(height=48, width=48)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "empty.parquet").write_bytes(b"")
    (folder / "broken.parquet").write_bytes(b"no parquet at all")
    (folder / "prompts.csv").write_text("a cat\n")
    (folder / "prompts.txt").write_text("a cat\n")
    (folder / "nan.py").write_text("def compute_score(image):\n    return float('nan')\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "typo.py").write_text("def compute_score(imgae):\n    return 1.0\n")
    (folder / "no_model").mkdir()
    shutil.copytree(tiny_checkpoint(), folder / "wordless")
    (folder / "wordless/tokenizer/tokenizer.json").write_text("{}")
    (folder / "stranger").mkdir()
    (folder / "stranger/model_index.json").write_text('{"_class_name": "QwenImagesPipeline"}')
    (folder / "run/global_step_3").mkdir(parents=True)
    return folder


def settings(data: Path, *overrides: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={tiny_checkpoint()}",
        f"data.train_files={data}/good.parquet",
        f"data.val_files={data}/good.jsonl",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.pipeline.height=32",
        "actor_rollout_ref.rollout.pipeline.width=32",
        "actor_rollout_ref.rollout.pipeline.max_sequence_length=128",
        f"trainer.default_local_dir={data}/fresh",
        *[override.replace("{data}", str(data)) for override in overrides],
    ]


def config(data: Path, *overrides: str):
    return composed(*settings(data, *overrides))


A = "actor_rollout_ref."
JUDGE = ["reward.reward_model.enable=true", "reward.reward_model.model_path=/m", "reward.scorers=[{name: vlm_judge}]"]
TWO = ["trainer.n_gpus_per_node=2", f"{A}actor.fsdp_config.ulysses_sequence_parallel_size=2"]
TOGETHER = [*TWO, f"{A}rollout.share_samples=true"]
NINE = "ulysses_sequence_parallel_size=2 does not divide the 9 tokens of a sample of height=48 width=48"
CASES = {
    # files
    "no model": (["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path is not set"),
    "model not there": (["actor_rollout_ref.model.path=/no/such/folder"], 'path="/no/such/folder" is no folder'),
    "folder is no model": (["actor_rollout_ref.model.path={data}/no_model"], "holds no model_index.json"),
    "broken tokenizer": (["actor_rollout_ref.model.path={data}/wordless"], "/wordless cannot be loaded: "),
    "unknown architecture": (["actor_rollout_ref.model.path={data}/stranger"], 'did you mean "QwenImagePipeline"'),
    "no prompts": (["data.train_files=null"], "data.train_files is not set"),
    "file not there": (["data.train_files=/no/such.parquet"], "no such file: /no/such.parquet. Set data.train_files="),
    "validation file not there": (["data.val_files=/no/such.parquet"], "Set data.val_files="),
    "folder for a file": (["data.train_files={data}"], "is a folder: set data.train_files"),
    "empty file": (["data.train_files={data}/empty.parquet"], "is empty: data.train_files needs at least one prompt"),
    "broken file": (["data.train_files={data}/broken.parquet"], "is not a readable parquet file"),
    "other file type": (["data.train_files={data}/prompts.csv"], "takes .parquet, .jsonl, .txt"),
    "no reward named": (["data.train_files={data}/nameless.jsonl"], "no reward is named: the prompts have no data_sou"),
    "no truth for a reward that compares": (
        ["data.train_files={data}/alone.jsonl", "reward.scorers=[{name: ocr_line}]"],
        'the reward "ocr_line" compares with the ground truth, and the prompt "a cat" has none',
    ),
    "misspelt column": (["data.train_files={data}/misspelt.jsonl"], 'Did you mean "promt"?'),
    "no ground truth": (["data.train_files={data}/without_truth.jsonl"], "reward_model has no ground_truth"),
    "few prompts": (["data.train_batch_size=12", f"{A}actor.ppo_mini_batch_size=4"], "more than the 8 prompts"),
    "long prompt": (["data.train_files={data}/long.jsonl"], "more than max_sequence_length=128: shorten it or raise"),
    "long prompt of validation": (
        [
            "data.val_files={data}/long.jsonl",
            f"{A}rollout.pipeline.max_sequence_length=2048",
            f"{A}rollout.val_kwargs.pipeline.max_sequence_length=128",
        ],
        "more than max_sequence_length=128: shorten it or raise max_sequence_length of actor_rollout_ref.rollout.pipel",
    ),
    "long negative prompt of all": ([f"{A}rollout.pipeline.negative_prompt={'word ' * 300}"], "a prompt has"),
    "half a letter": (["data.train_files={data}/half.jsonl"], r"half.jsonl, line 2: prompt: letter 3 is \ud83d"),
    "half a letter of the truth": (["data.val_files={data}/half_truth.jsonl"], r"ground_truth: letter 1 is \ud83d"),
    "few letters, many tokens": (["data.val_files={data}/long_in_bytes.jsonl"], "more than max_sequence_length=128"),
    "long negative prompt": (["data.train_files={data}/long_negative.jsonl"], "more than max_sequence_length=128"),
    # names
    "unknown algorithm": ([f"{A}model.algorithm=flow_gpro"], 'unknown algorithm "flow_gpro": did you mean "flow_grpo"'),
    "unknown loss": ([f"{A}actor.diffusion_loss.loss_mode=flow_gpro"], 'did you mean "flow_grpo"'),
    "unknown estimator": (["algorithm.adv_estimator=gdop"], 'did you mean "gdpo"'),
    "unknown setting of a loss": ([f"+{A}actor.diffusion_loss.extra.penalti=1"], "penalti"),
    "unknown step": ([f"{A}rollout.algo.sde_type=dance_sd"], 'did you mean "dance_sde"'),
    "unknown window schedule": ([f"{A}rollout.algo.sde_window_schedule=progresive"], 'did you mean "progressive"'),
    "unknown engine": ([f"{A}rollout.name=difusers"], 'did you mean "diffusers"'),
    "unknown strategy": ([f"{A}actor.strategy=fsdp"], 'did you mean "fsdp2"'),
    "unknown optimizer": ([f"{A}actor.optim.optimizer=AdmW"], 'did you mean "AdamW"'),
    "unknown learning-rate schedule": ([f"{A}actor.optim.lr_scheduler_type=cosin"], 'did you mean "cosine"'),
    "unknown dtype": ([f"{A}actor.engine.dtype=bfloat"], 'did you mean "bfloat16"'),
    "unknown content of checkpoints": ([f"{A}actor.checkpoint.save_contents=[modle]"], 'did you mean "model"'),
    "unknown tracker": (["trainer.logger=[wandbb]"], 'did you mean "wandb"'),
    "unknown trainer": (["algorithm.trainer_type=policy_gradients"], 'did you mean "policy_gradient"'),
    "unknown sample source": (["algorithm.sample_source=onlin"], 'did you mean "online"'),
    "unknown device": (["trainer.device=gpu"], "expected cuda or cpu"),
    "unknown reward": (["data.train_files={data}/other_reward.jsonl"], 'did you mean "jpeg_compressibility"'),
    "unknown scorer": (["+reward.scorers.jpg.quality=3"], 'unknown reward (data_source) "jpg"'),
    "setting of a scorer": (["+reward.scorers.jpeg_compressibility.qality=3"], 'did you mean "quality"'),
    "value of a scorer": (["+reward.scorers.jpeg_compressibility.quality=0"], "expected 1 or more, at most 95"),
    "scorer of other data": (["+reward.scorers.ocr.num_threads=2"], 'unknown data_source of the prompts "ocr"'),
    "scorer beside a function": (
        ["reward.custom_reward_function.path={data}/nan.py", "+reward.scorers.jpeg_compressibility.quality=3"],
        "give its settings in reward_kwargs there",
    ),
    "reward file not there": (["reward.custom_reward_function.path=/no/reward.py"], "there is no such file"),
    "reward function not there": (
        ["reward.custom_reward_function.path={data}/nan.py", "reward.custom_reward_function.name=score"],
        "known: compute_score",
    ),
    "reward parameter": (["reward.custom_reward_function.path={data}/typo.py"], 'did you mean "image"'),
    "extra_info": (["data.train_files={data}/extra_text.jsonl"], "line 8: extra_info is 'a text'; expected an object"),
    "agent's name": (["data.val_files={data}/agent_number.jsonl"], "line 8: agent_name is 7; expected the name of"),
    "unknown agent": (["data.train_files={data}/other_agent.jsonl"], 'did you mean "diffusion_single_turn_agent"'),
    "image not there": (["data.train_files={data}/no_image.jsonl"], "line 8: an image of the column `images` cannot"),
    "no image": (["data.val_files={data}/text_as_image.jsonl"], "line 8: an image of the column `images` cannot be"),
    "image of no kind": (["data.train_files={data}/images_number.jsonl"], "line 8: images is 3; expected a list of"),
    "unknown default agent": ([f"{A}rollout.agent.default_agent_loop=single"], 'rollout.agent "single"'),
    "unknown reward manager": (["reward.reward_manager.name=imgae"], 'did you mean "image"'),
    "reward manager for text": (["reward.reward_manager.name=naive"], 'unknown reward.reward_manager.name "naive"'),
    "reward manager's file": (["reward.reward_manager.source=importlib"], "reward_manager.module.path=<file.py>"),
    "module not there": ([f"{A}model.external_lib=no_such_module"], "is its folder on PYTHONPATH?"),
    "reward that exits": (["reward.custom_reward_function.path={data}/exits.py"], "cannot be imported: SystemExit: 3"),
    "folder with too long a name": (["trainer.default_local_dir={data}/" + "x" * 300], "File name too long"),
    # what would change nothing
    "servers that are not there": (
        [f"{A}rollout.n_gpus_per_node=2"],
        "one_step_off or fully_async, or leave",
    ),
    "weights of steps": (["algorithm.rollout_correction.rollout_is=step"], "set trainer.mode=separate, one_step_off"),
    "rejection": (["algorithm.rollout_correction.rollout_rs=step_k1"], "rollout_correction has no effect where the"),
    "judge without a model": (["reward.reward_model.enable=true"], "needs reward.reward_model.model_path=<the judge's"),
    "judge without GPUs in its pool": (
        [*JUDGE, "reward.reward_model.enable_resource_pool=true"],
        "say how many, reward.reward_model.n_gpus_per_node=1",
    ),
    "judge that would wait for a GPU": (
        [*JUDGE, "reward.reward_model.enable_resource_pool=true", "reward.reward_model.n_gpus_per_node=1"],
        "there is no GPU here (trainer.device=cpu)",
    ),
    "judge that nobody asks": (
        ["reward.reward_model.enable=true", "reward.reward_model.model_path=/m"],
        "starts a judge that nobody asks",
    ),
    "list of rewards": (["reward.scorers=[{name: jpg}]"], 'unknown reward (data_source) "jpg"'),
    "reward for no row": (
        ["reward.scorers=[{name: jpeg_compressibility, data_sources: [x]}]"],
        "no reward for prompts with data_source",
    ),
    "function that is not there": (["reward.scorers=[custom_reward_function]"], "say where it is, reward.custom_rew"),
    "setting of a function": (
        ["reward.custom_reward_function.path={data}/nan.py", "reward.scorers=[{name: custom_reward_function, a: 2}]"],
        "reward.scorers.custom_reward_function.a has no effect on a function of your own",
    ),
    "gdpo by data source": (
        ["reward.scorers=[{name: ocr, data_sources: [x]}, ocr_line]", "algorithm.adv_estimator=gdpo"],
        "compares each reward over all images",
    ),
    "reward that needs a setting": (["reward.scorers=[{name: http, scorer: x}]"], "needs reward.scorers.http.address"),
    # numbers
    "height": ([f"{A}rollout.pipeline.height=40"], "height=40 is no multiple of 16 (vae_scale_factor * 2): try 32 or"),
    "width of validation": ([f"{A}rollout.val_kwargs.pipeline.width=8"], "val_kwargs.pipeline.width=8 is no multiple"),
    "validation that cannot be shared": (
        [*TOGETHER, *(f"{A}rollout.val_kwargs.pipeline.{side}=48" for side in ("height", "width"))],
        f"{NINE} (validation's, which is drawn with",
    ),
    "row that cannot be shared": ([*TWO, "data.train_files={data}/nine_tokens.jsonl"], NINE),
    "row of validation that cannot be shared": ([*TOGETHER, "data.val_files={data}/nine_tokens.jsonl"], NINE),
    "steps": ([f"{A}rollout.pipeline.num_inference_steps=0"], "num_inference_steps=0"),
    "batch": (["data.train_batch_size=6", f"{A}actor.ppo_mini_batch_size=4"], "is no multiple of"),
    "ranks": (["trainer.n_gpus_per_node=3", f"{A}rollout.n=4"], "do not divide among 3 devices"),
    "group of one": ([f"{A}rollout.n=1"], "a group of one image has nothing to compare with"),
    "no images": ([f"{A}rollout.n=0"], "actor_rollout_ref.rollout.n=0: expected 1 or more"),
    "window outside": ([f"{A}rollout.algo.sde_window_range=[4,12]"], "lies outside the 9 steps that can be trained"),
    "window too large": ([f"{A}rollout.algo.sde_window_size=10"], "expected 1 to 9"),
    "fraction": (["algorithm.timestep_fraction=1.5"], "timestep_fraction=1.5: expected above 0, at most 1"),
    "average": ([f"{A}actor.ema_decay=1.0"], "ema_decay=1.0: expected 0 or more, below 1"),
    "checkpoints": (["trainer.max_ckpt_to_keep=0"], "trainer.max_ckpt_to_keep=0: expected 1 or more"),
    "training steps": (["trainer.total_training_steps=0"], "trainer.total_training_steps=0: expected 1 or more"),
    "guidance": ([f"{A}model.algorithm=diffusion_nft", f"{A}rollout.pipeline.true_cfg_scale=4"], "true_cfg_scale=1"),
    # resuming
    "resume mode": (["trainer.resume_mode=atuo"], 'did you mean "auto"'),
    "no checkpoint named": (["trainer.resume_mode=resume_path"], "trainer.resume_from_path=<a global_step_N folder>"),
    "checkpoint that is none": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path={data}/run/global_step_3"],
        "is no checkpoint",
    ),
    "profile beyond the end": (["trainer.profile_step=3"], "profile_step=3: the run has 2 steps"),
    "validation without prompts": (["trainer.val_only=true", "data.val_files=null"], "needs data.val_files"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_before_any_worker_starts(name, data, monkeypatch):
    def no_ray(*args, **kwargs):
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", no_ray)
    overrides, said = CASES[name]
    with pytest.raises(Exception) as caught:  # noqa: B017  (which one is checked below)
        main_diffusion.run_diffusion(config(data, *overrides))
    line = users_mistake(caught.value)
    assert line is not None, f"a traceback for a user's mistake: {caught.value!r}"
    assert said in line and "\n" not in line
    assert not (data / "fresh").exists()


@pytest.mark.parametrize(
    ("architecture", "file", "said"),
    [
        ("QwenImagePipeline", "image", "images has 1, and this model draws from prompts alone: leave the column out"),
        ("WanPipeline", "image", "out, or type actor_rollout_ref.model.architecture=WanImageToVideoPipeline if"),
        ("LTX2Pipeline", "image", "out, or type actor_rollout_ref.model.architecture=LTX2ImageToVideoPipeline if"),
        ("LTX2Pipeline", "sound", "audios is given, and no model takes audios with a prompt: leave the column out, or"),
        ("LTX2ImageToVideoPipeline", "long_with_image", "tokens, more than max_sequence_length=128"),
        ("LTX2ImageToVideoPipeline", "long_negative_with_image", "tokens, more than max_sequence_length=128"),
    ],
)
def test_images_are_looked_at_or_refused_and_prompts_with_them_have_a_limit(architecture, file, said, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    shown = {"images": [str(tmp_path / "one.png")]}
    rows = {
        "image": row(**shown),
        "sound": row(audios=["one.wav"]),
        "long_with_image": row("word " * 300, **shown),
        "long_negative_with_image": row(negative_prompt="word " * 300, **shown),
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(rows[file]) + "\n") * 4)
    given = [f"{A}model.path={tiny_checkpoint(architecture)}", "data.val_files=null"]
    config = prepare_config(composed(*settings(tmp_path, *given, "data.train_files={data}/rows.jsonl")))
    with pytest.raises(ValueError) as caught:
        check_data(config)
    assert said in str(caught.value)


def test_what_is_answered_over_http_needs_the_package_that_writes_it(tmp_path, monkeypatch):
    def without_av(name, *rest, find=importlib.util.find_spec):
        return None if name == "av" else find(name, *rest)

    (tmp_path / "rows.jsonl").write_text((json.dumps(row(source="loudness")) + "\n") * 4)
    given = [
        f"{A}model.path={tiny_checkpoint('LTX2Pipeline')}", "data.val_files=null",
        "data.train_files={data}/rows.jsonl", "trainer.log_train_groups=0", "trainer.mode=separate",
    ]  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", without_av)
    check_rewards(prepare_config(composed(*settings(tmp_path, *given))))
    with pytest.raises(ModuleNotFoundError, match="pip install 'verl-omni"):
        check_rewards(prepare_config(composed(*settings(tmp_path, *given, f"{A}rollout.http.port=0"))))


def test_validation_prompts_have_validations_limit(data):
    """They may be longer than those of training, where validation takes more tokens."""
    long = ("data.val_files={data}/long.jsonl", f"{A}rollout.val_kwargs.pipeline.max_sequence_length=2048")
    assert preflight(config(data, *long)) is not None


def test_the_good_configuration_of_these_tests_is_good(data):
    prepared = preflight(config(data))
    assert prepared.actor_rollout_ref.rollout.algo.sde_type == "sde"
    assert prepared.actor_rollout_ref.actor.diffusion_loss.clip_ratio == 1e-4


# ---- the command itself --------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path | None = None, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    call = [sys.executable, *python, "-m", "verl_omni.trainer.main_diffusion", *arguments]
    clean = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}  # of runs in this process
    return subprocess.run(call, cwd=cwd, env=clean, capture_output=True, text=True, timeout=250)


def test_the_command_prints_one_line_and_fails_and_the_first_before_anything_slow_is_loaded(data, tmp_path):
    done = command(*settings(data, f"{A}model.algorithm=flow_gpro"), cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode != 0 and done.stdout == ""
    before, after = (set(re.findall(r"\| +(\w+)\n", part)) for part in done.stderr.split(": checking the settings"))
    slow = {"torch", "verl", "ray", "diffusers"}
    assert not slow & before and "ray" in after  # torch is loaded by its name, which this clock does not see
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("import time:")]
    assert len(lines) == 2 and lines[0].startswith(f"verl-omni {verl_omni.__version__}: checking")
    assert lines[1].startswith('error: unknown algorithm "flow_gpro": did you mean "flow_grpo"?')
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.sav_freq=1", "trainer.save_freq"),
        ("actor_rollout_ref.rollout.pipeline.hight=32", "pipeline.height"),
        ("+trainer.sav_freq=1", "trainer.save_freq"),
        ("++trainer.sav_freq=1", "trainer.save_freq"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, meant, capsys):
    with pytest.raises(SystemExit) as left:
        train.check_override_names([key])
    assert f'unknown config key "{key.split("=")[0].lstrip("+")}"' in str(left.value) and meant in str(left.value)
    assert "--help" in str(left.value) and "\n" not in str(left.value) and len(str(left.value)) < 300


@pytest.mark.parametrize("key", ["trainer.save_freq=1", "++trainer.save_freq=1", "--config-name=x", "hydra.verbose=1",
                                 "actor_rollout_ref.actor.diffusion_loss.extra.penalty=2"])  # fmt: skip
def test_known_keys_and_hydras_own_words_pass(key):
    train.check_override_names([key])


def test_keys_of_one_algorithm_or_reward_need_no_plus():
    key = "actor_rollout_ref.actor.diffusion_loss.extra.penalty=2"
    assert with_plus(key) == f"++{key}"
    for other in (f"+{key}", "trainer.save_freq=1", "--config-name=x.extra.y"):
        assert with_plus(other) == other


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_this_projects(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main_diffusion", flag])
    main_diffusion.main()
    assert capsys.readouterr().out == f"verl-omni {importlib.metadata.version('verl-omni')}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.parquet"], 'unknown recipe "train.parquet"'),
        (["trainer.device=cpu", "train.parquet"], 'cannot read the argument "train.parquet"'),
        ([f"{A}rollout.n=many"], "rollout.n=many: Value 'many' of type 'str' could not be converted to Integer"),
        ([f"{A}rollout.n=[4,8]"], "rollout.n=[4,8]: Value"),
        ([f"{A}rollout.n="], "rollout.n=: Value '' of type 'str' could not be converted to Integer"),
        (["data.train_batch_size=null"], "data.train_batch_size=null: "),
        ([f"{A}rollout.n=2,4"], "Ambiguous value for argument 'actor_rollout_ref.rollout.n=2,4'"),
        (["data.train_files=[a.parquet"], 'cannot read the argument "data.train_files=[a.parquet"'),
        (["--config-name", "nope"], "Cannot find primary config 'nope'"),
        (["--config-dir", "/no/dir", "--config-name", "mine"], "'/no/dir' not found"),
        (["--config-dir", "{here}", "--config-name", "open"], "open.yaml"),
        (["--config-dir", "{here}", "--config-name", "latin"], "is no text in UTF-8"),
        (["--config-dir", "{here}", "--config-name", "list"], "primary config 'list' must be a DictConfig"),
        (["--config-dir", "{here}", "--config-name", "empty"], "defaults: [diffusion_trainer, _self_]"),
        (["--config-dir", "{here}", "--config-name=empty", f"{A}model.path=x"], "_self_]`; does empty?)"),
        (["--config-dir", "{here}", "--config-name", "latin", *["data.train_files=x"] * 30], "the recipe latin is no"),
        (["--config-dir", "{here}", "--config-name", "typed"], "Value 'often' of type 'str' could not be converted"),
    ],
)
def test_hydras_own_complaints_are_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    base = "defaults: [diffusion_trainer, _self_]\n"
    (tmp_path / "open.yaml").write_text("a: [1,\nb: {")
    (tmp_path / "latin.yaml").write_bytes("recipe: caf\xe9\n".encode("latin-1"))
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "typed.yaml").write_text(base + "trainer: {save_freq: often}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["verl-omni", *(a.replace("{here}", str(tmp_path)) for a in arguments)])
    with pytest.raises(SystemExit) as left:
        main_diffusion.main()
    # What Hydra refuses ends with its line; what the run itself refuses has printed its line.
    line = left.value.code if isinstance(left.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert left.value.code and line.startswith("error: ") and said in line and "\n" not in line and len(line) < 400


def test_a_value_of_the_wrong_type_is_named(data, tmp_path):
    done = command(*settings(data, f"{A}rollout.n=many"), cwd=tmp_path)
    assert done.returncode != 0 and "actor_rollout_ref.rollout.n" in done.stderr and "many" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_the_printed_configuration_are_readable(tmp_path):
    text = command("--help", "all", cwd=tmp_path).stdout
    for knob in ("actor_rollout_ref.model.algorithm=flow_grpo", "trainer.resume_mode=auto", "data.train_files=null"):
        assert f"  {knob}\n      " in text
    assert "PPO clip range epsilon: the ratio is kept within 1 -/+ epsilon [above 0]\n" in text and "--cfg job" in text
    done = command("--cfg", "job", "trainer.save_freq=7", cwd=tmp_path)
    assert done.returncode == 0 and "  save_freq: 7\n" in done.stdout and "hydra:" not in done.stdout


def test_windows_count_the_steps_that_the_model_really_takes(data):
    """The step to σ = 0 is not to be trained. Before diffusers 0.39 Z-Image reached the image one step early."""
    model = f"{A}model.path={tiny_checkpoint('ZImagePipeline')}"
    steps, window = f"{A}rollout.pipeline.num_inference_steps=6", f"{A}rollout.algo.sde_window_range=[0,{{}}]"
    trained = 5 if diffusers_since("0.39") else 4
    for given, most in (([], 5), ([model], trained)):
        assert preflight(config(data, *given, steps, window.format(most))) is not None
        with pytest.raises(ValueError, match=f"lies outside the {most} steps that can be trained"):
            preflight(config(data, *given, steps, window.format(most + 1)))


def test_a_model_that_the_hub_does_not_give_is_told_in_one_line():
    told = users_mistake(HubError("nobody/model is no folder here"))
    assert told == "nobody/model is no folder here"


def test_a_column_that_is_nearly_the_ground_truth_is_named():
    choice = read_choices([{"name": "ocr_line"}])["ocr_line"]
    row = {"prompt": "a cat", "reward_model": {}, "extra_info": {"ground_thruth": "7", "seed": 1}}
    with pytest.raises(ValueError, match='column ground_truth, .*Is it the column "ground_thruth"\\?$'):
        check_ground_truth(choice, [row])
    with pytest.raises(ValueError, match="or choose another reward$"):
        check_ground_truth(choice, [row | {"extra_info": {"seed": 1}}])
