"""Bad settings: the command line, recipes, numbers and names."""

from pathlib import Path

from inputs import BadInput

A = "actor_rollout_ref."


def numbers() -> list[BadInput]:
    """Out of its range: the line names the knob and the value."""
    alone = [
        f"{A}actor.diffusion_loss.clip_ratio=-1", f"{A}actor.diffusion_loss.adv_clip_max=0",
        f"{A}actor.kl_loss_coef=-0.04", f"{A}actor.ema_decay=1.0", f"{A}actor.ppo_epochs=0",
        f"{A}actor.optim.clip_grad=-1", f"{A}actor.optim.lr=-0.001", f"{A}actor.optim.lr=nan", f"{A}actor.optim.lr=inf",
        f"{A}actor.optim.weight_decay=-1", f"{A}actor.optim.lr_warmup_steps=-1", f"{A}actor.fsdp_config.fsdp_size=3",
        f"{A}model.lora_rank=-4", f"{A}rollout.n=0", f"{A}rollout.n=1", f"{A}rollout.seed=-1",
        f"{A}rollout.pipeline.height=40", f"{A}rollout.pipeline.height=-32",
        f"{A}rollout.pipeline.num_inference_steps=0", f"{A}rollout.pipeline.num_frames=5",
        f"{A}rollout.pipeline.guidance_scale=4", f"{A}rollout.pipeline.max_sequence_length=-5",
        f"{A}rollout.pipeline.audio_duration_s=5", f"{A}rollout.algo.audio_share=0.5",
        f"{A}rollout.algo.noise_level=0", f"{A}rollout.algo.noise_level=-0.7", f"{A}rollout.algo.noise_level=nan",
        f"{A}rollout.algo.sde_window_size=10", f"{A}rollout.val_kwargs.n=0", f"{A}rollout.val_kwargs.noise_level=-1",
        f"{A}rollout.val_kwargs.pipeline.width=8", f"{A}rollout.val_kwargs.pipeline.max_sequence_length=0",
        "data.train_batch_size=0", "data.val_batch_size=0", "reward.batch_size=0", "algorithm.timestep_fraction=0",
        "algorithm.old_policy_update_interval=0", "trainer.total_epochs=0", "trainer.total_training_steps=0",
        "trainer.save_freq=-2", "trainer.log_val_images=-5", "trainer.max_ckpt_to_keep=0", "trainer.profile_step=99",
        "trainer.n_gpus_per_node=0", "ray.num_cpus=-1",
        f"{A}rollout.n=1000000000", f"{A}rollout.val_kwargs.n=1000000000", f"{A}rollout.agent.num_workers=1000000",
        f"{A}rollout.pipeline.height=1000000000", f"{A}rollout.pipeline.num_inference_steps=1000000000",
        "trainer.total_training_steps=100000000000000000000", "trainer.total_epochs=100000000000000000000",
        "reward.num_workers=1000000", "reward.timeout=1e+300",
    ]  # fmt: skip
    cases = [BadInput("Numbers", setting.split(".", 1)[1] if setting.startswith(A) else setting, (setting,))
             for setting in alone]  # fmt: skip
    several = [
        ("lora_alpha=0", (f"{A}model.lora_alpha=0", f"{A}model.lora_rank=4")),
        ("sde_type=cps with noise_level=2", (f"{A}rollout.algo.noise_level=2", f"{A}rollout.algo.sde_type=cps")),
        ("total_epochs=-1", ("trainer.total_epochs=-1", "trainer.total_training_steps=null")),
        ("a second beta of 1.5", (f"{A}actor.optim.betas=[0.9,1.5]",)),
        ("max_connections=0",
         (f"{A}rollout.http.max_connections=0", f"{A}rollout.http.port=0", "trainer.mode=separate")),
        ("betas with one number", (f"{A}actor.optim.betas=[0.9]",)),
        ("sde_window_range backwards", (f"{A}rollout.algo.sde_window_range=[3,1]",)),
        ("filter_groups with one batch",
         ("algorithm.filter_groups.max_num_gen_batches=1", "algorithm.filter_groups.enable=true")),
        ("one denoising step, DPO",
         (f"{A}rollout.pipeline.num_inference_steps=1", f"{A}model.algorithm=dpo")),
        ("branches that do not divide a prompt's images", (f"{A}rollout.algo.branches=3",)),
        ("a pool of two", (f"{A}rollout.pool.size=2", f"{A}rollout.pool.num_inference_steps=2")),
        ("a pool that costs as much", (f"{A}rollout.pool.size=16", f"{A}rollout.pool.num_inference_steps=4")),
        ("a reference in 8 bits without a KL term", (f"{A}ref.precision=fp8", f"{A}rollout.precision=fp8")),
        ("drawing block by block with one device", (f"{A}rollout.gather=blocks",)),
        ("samples shared by one device", (f"{A}rollout.share_samples=true",)),
        ("validation of samples that cannot be shared",
         (f"{A}actor.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2",
          f"{A}rollout.share_samples=true", f"{A}rollout.val_kwargs.pipeline.height=48",
          f"{A}rollout.val_kwargs.pipeline.width=48")),
        ("a rollout server with two devices", (f"{A}rollout.tensor_model_parallel_size=2",)),
        ("variables to take along to no cluster", ("ray.env_vars=[HOME]",)),
        ("layers in 8 bits where nothing is", (f"{A}actor.engine.fp8_modules=[to_q]",)),
        ("more opponents than images", ("reward.pairwise.opponents=99", "reward.pairwise.by=score")),
        ("keep_best without a validation", ("trainer.keep_best=true", "trainer.test_freq=0")),
        ("a teacher that is not there", (f"{A}actor.teacher.path=/nowhere", f"{A}model.algorithm=opd")),
        ("the gradient of a reward that has none",
         (f"{A}model.algorithm=draft", "reward.scorers=[{name: jpeg_compressibility}]")),
        ("a rewriter that is not there", (f"{A}rewriter.path=/nowhere",)),
        ("a learning rate of no rewriter", (f"{A}rewriter.lr=0.1",)),
        ("DiffusionNFT, beta=0", (f"{A}actor.diffusion_loss.extra.beta=0", f"{A}model.algorithm=diffusion_nft")),
        ("DiffusionNFT, adv_clip_max=0",
         (f"{A}actor.diffusion_loss.adv_clip_max=0", f"{A}model.algorithm=diffusion_nft")),
        ("DiffusionNFT with guidance", (f"{A}rollout.pipeline.true_cfg_scale=4", f"{A}model.algorithm=diffusion_nft")),
    ]  # fmt: skip
    cases += [
        BadInput("Numbers", name, arguments, (arguments[0].partition("=")[0].split(".")[-1],))
        for name, arguments in several
    ]
    cases += [
        BadInput("Numbers", "3 prompts in steps of 2", ("data.train_batch_size=3", f"{A}actor.ppo_mini_batch_size=2"),
                 ("train_batch_size=3", "ppo_mini_batch_size=2")),
        BadInput("Numbers", "4 images on 3 devices", ("trainer.n_gpus_per_node=3",), ("3 devices",)),
        BadInput("Numbers", "more processes than Ray has CPUs", ("trainer.mode=separate", "ray.num_cpus=1"),
                 ("training 1", "rollout servers 1", "1 node with 1 CPU"), early=False),
        BadInput("Numbers", "servers on more nodes than there are", ("trainer.mode=separate", "rollout.nnodes=2"),
                 ("training 1", "rollout servers 1 on each of 2 nodes", "Ray has 1 node"), early=False),
        BadInput("Numbers", "more prompts a step than there are", ("data.train_batch_size=12",),
                 ("train_batch_size=12", "6 prompts")),
    ]  # fmt: skip
    return cases


def names() -> list[BadInput]:
    typos = [
        (f"{A}model.algorithm=flow_gpro", "flow_grpo"), (f"{A}actor.diffusion_loss.loss_mode=flow_gpro", "flow_grpo"),
        ("algorithm.adv_estimator=gdop", "gdpo"), (f"{A}rollout.algo.sde_type=dance_sd", "dance_sde"),
        (f"{A}rollout.algo.sde_window_schedule=progresive", "progressive"), (f"{A}rollout.name=difusers", "diffusers"),
        (f"{A}actor.strategy=fsdp", "fsdp2"),
        (f"{A}actor.optim.optimizer=AdmW", "AdamW"), (f"{A}actor.optim.lr_scheduler_type=cosin", "cosine"),
        (f"{A}actor.engine.dtype=bfloat", "bfloat16"), (f"{A}actor.engine.dtype=float16", "bfloat16"),
        (f"{A}actor.old_log_probs=bogus", "rollout"),
        (f"{A}actor.checkpoint.save_contents=[modle]", "model"), (f"{A}model.load_format=bogus", "dummy"),
        (f"{A}actor.engine.attention_backend=bogus", "native"),
        (f"{A}rollout.agent.default_agent_loop=bogus", "diffusion_single_turn_agent"),
        ("trainer.logger=[wandbb]", "wandb"),
        ("trainer.device=gpu", "cpu"), ("trainer.resume_mode=atuo", "auto"),
        ("algorithm.trainer_type=policy_gradients", "policy_gradient"), ("algorithm.sample_source=onlin", "online"),
        ("algorithm.adv_mode=bogus", "continuous"), ("algorithm.old_policy_decay_schedule=bogus", "copy"),
        ("algorithm.timestep_distribution=bogus", "uniform"), ("reward.reward_manager.name=imag", "image"),
    ]  # fmt: skip
    cases = []
    for setting, meant in typos:
        value = setting.partition("=")[2].strip("[]")
        cases.append(BadInput("Names", setting.removeprefix(A), (setting,), (value, meant)))
    lora = f"{A}model.lora_rank=4"
    cases += [
        BadInput("Names", "an unknown step in validation",
                 (f"{A}rollout.val_kwargs.sde_type=bogus", f"{A}rollout.val_kwargs.noise_level=0.5"), ("bogus", "cps")),
        BadInput("Names", "a knob that is gone", (f"{A}actor.fsdp_config.strategy=fsdp2",), ("fsdp_config.strategy",)),
        BadInput("Names", "a knob that has moved, with what it cannot be",
                 (f"{A}actor.fsdp_config.param_offload=maybe",), ("maybe", "actor.engine.param_offload")),
        BadInput("Names", "a step that trains nothing: sde_type=ode", (f"{A}rollout.algo.sde_type=ode",)),
        BadInput("Names", "an optimizer that needs a closure", (f"{A}actor.optim.optimizer=LBFGS",)),
        BadInput("Names", "an optimizer for sparse gradients", (f"{A}actor.optim.optimizer=SparseAdam",)),
        BadInput("Names", "a GPU where there is none", ("trainer.device=cuda",), ("trainer.device=cuda", "no GPU")),
        BadInput("Names", "a tracker that is not installed", ("trainer.logger=[mlflow]",), ("mlflow",)),
        BadInput("Names", "a training engine that is not installed", (f"{A}actor.strategy=veomni",), ("make veomni",)),
        BadInput("Names", "a setting of another training engine", (f"{A}actor.veomni_config.fsdp_size=1",),
                 ("veomni_config.fsdp_size=1", "strategy=veomni")),
        BadInput("Names", "no tracker at all", ("trainer.logger=[]",), ("trainer.logger",)),
        BadInput("Names", "LoRA on a layer that is not there", (f"{A}model.target_modules=[to_qq]", lora), ("to_qq",)),
        BadInput("Names", "an unknown start of LoRA", (f"{A}model.lora_init=bogus", lora)),
        BadInput("Names", "LoRA weights that are not there", (f"{A}model.lora_path=/no/lora", lora), ("/no/lora",)),
        BadInput("Names", "a folder without LoRA weights", (f"{A}model.lora_path={{f}}/lora", lora), ("/lora",),
                 files={"lora/notes.txt": "nothing"}),
        BadInput("Names", "an unknown argument of the engine", (f"{A}rollout.engine_kwargs.speed=fast",), ("speed",)),
        BadInput("Names", "an unknown setting of the loss", (f"{A}actor.diffusion_loss.extra.penalti=1",),
                 ("penalti",)),
        BadInput("Names", "a module that is not there", (f"{A}model.external_lib=no_such_module",)),
        BadInput("Names", "a file of one's own that is not there", (f"{A}model.external_lib=no_such_file.py",)),
        BadInput("Names", "a module with a syntax error", (f"{A}model.external_lib=broken_module",),
                 ("broken_module",), files={"broken_module.py": "def f(:\n"}),
        BadInput("Names", "a module that imports what is not there", (f"{A}model.external_lib=lacking",), ("no_dep",),
                 files={"lacking.py": "import no_dep\n"}),
        BadInput("Names", "an algorithm registered under a taken name", (f"{A}model.external_lib=twice",),
                 ("flow_grpo",), files={"twice.py": TWICE}),
        BadInput("Names", "a model adapter without its methods", (f"{A}model.external_lib=half",
                 f"{A}model.algorithm=half_algo", "algorithm.adv_estimator=flow_grpo",
                 f"{A}actor.diffusion_loss.loss_mode=flow_grpo"), ("HalfAdapter",), files={"half.py": HALF}),
        BadInput("Names", "corrections where there is nothing to correct",
                 ("algorithm.rollout_correction.rollout_is=step",), ("rollout_correction",)),
        BadInput("Names", "a callback that is not there", ("trainer.callbacks=[no_file.py:Watch]",), ("no_file.py",)),
        BadInput("Names", "a callback whose method nobody calls", ("trainer.callbacks=[watch.py:Watch]",),
                 ("on_step_ended", "on_step_end"), files={"watch.py": WATCH}),
        BadInput("Names", "a callback that fails", ("trainer.callbacks=[watch.py:Fails]",),
                 ("watch.py:Fails", "on_run_start", "KeyError"), files={"watch.py": WATCH}, early=False),
        BadInput("Names", "latents for a reward that looks at images", ("reward.input=latents",),
                 ("reward.input=latents", "latents", "image")),
        BadInput("Names", "a served reward model", ("reward.reward_model.enable=true",), ("reward_model.enable",)),
    ]  # fmt: skip
    return cases


WATCH = """
from verl_omni.trainer.callbacks import Callback

class Watch(Callback):
    def on_step_ended(self, run, step):
        pass

class Fails(Callback):
    def on_run_start(self, run):
        raise KeyError("mine")
"""
TWICE = """
from verl_omni.algorithms import registry
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss

registry.register_diffusion_loss("flow_grpo")(type("Other", (FlowGRPOLoss,), {}))
"""

HALF = """
from verl_omni.pipelines.model_base import DiffusionModelBase

@DiffusionModelBase.register("QwenImagePipeline", algorithm="half_algo")
class HalfAdapter(DiffusionModelBase):
    pass
"""


def command_line() -> list[BadInput]:
    theme, recipe = "Command line and recipes", ("--config-dir", "{f}", "--config-name", "mine")
    return [
        BadInput(theme, "a misspelt key", ("trainer.sav_freq=1",), ("trainer.sav_freq", "trainer.save_freq")),
        BadInput(theme, "a misspelt key with +", ("+trainer.sav_freq=1",), ("trainer.sav_freq",)),
        BadInput(theme, "a new key with +", ("+typo=1",), ("typo",)),
        BadInput(theme, "a misspelt group", ("trainr.save_freq=1",), ("trainr.save_freq",)),
        BadInput(theme, "a word without =", ("train.parquet",), ("train.parquet",)),
        BadInput(theme, "an unknown flag", ("--epochs", "3"), ("--epochs",)),
        BadInput(theme, "nothing after =", (f"{A}rollout.n=",), ("rollout.n",)),
        BadInput(theme, "text for a number", (f"{A}rollout.n=many",)),
        BadInput(theme, "a fraction for a count", (f"{A}rollout.n=2.5",)),
        BadInput(theme, "a list for a number", (f"{A}rollout.n=[4,8]",), ("rollout.n",)),
        BadInput(theme, "a mapping for a number", (f"{A}actor.optim.lr={{a:1}}",), ("optim.lr",)),
        BadInput(theme, "a number for a list", (f"{A}actor.optim.betas=0.9",), ("betas",)),
        BadInput(theme, "null for a number", ("data.train_batch_size=null",), ("train_batch_size",)),
        BadInput(theme, "null for a group", ("trainer=null",), ("trainer",)),
        BadInput(theme, "several values", (f"{A}rollout.n=2,4",), ("rollout.n",)),
        BadInput(theme, "an open bracket", ("data.train_files=[a.parquet",), ("data.train_files",)),
        BadInput(theme, "a reference to nothing", ("trainer.experiment_name=${nope}",), ("nope",)),
        BadInput(theme, "a recipe that is not there", ("--config-name", "nope"), ("nope",)),
        BadInput(theme, "a folder of recipes that is not there", ("--config-dir", "/no/dir", "--config-name", "mine"),
                 ("/no/dir",)),
        BadInput(theme, "a recipe that is no YAML", recipe, ("mine.yaml",), files={"mine.yaml": "a: [1,\nb: {"}),
        BadInput(theme, "a recipe indented with tabs", recipe, ("mine.yaml",),
                 files={"mine.yaml": "defaults: [diffusion_trainer, _self_]\ntrainer:\n\tsave_freq: 1\n"}),
        BadInput(theme, "a recipe that is a list", recipe, ("mine",), files={"mine.yaml": "- a\n- b\n"}),
        BadInput(theme, "an empty recipe", recipe, ("mine",), files={"mine.yaml": ""}),
        BadInput(theme, "a recipe in Latin-1", recipe, ("mine",),
                 files={"mine.yaml": "recipe: caf\xe9\n".encode("latin-1")}),
        BadInput(theme, "a misspelt key in a recipe", recipe, ("sav_freq",),
                 files={"mine.yaml": "defaults: [diffusion_trainer, _self_]\ntrainer: {sav_freq: 1}\n"}),
        BadInput(theme, "text for a number in a recipe", recipe, ("save_freq", "often"),
                 files={"mine.yaml": "defaults: [diffusion_trainer, _self_]\ntrainer: {save_freq: often}\n"}),
    ]  # fmt: skip


def folders() -> list[BadInput]:
    theme = "The run's folder"
    where = "trainer.default_local_dir="

    def loop(run_dir: Path) -> None:
        run_dir.mkdir()
        (run_dir / "loop").symlink_to(run_dir / "other")
        (run_dir / "other").symlink_to(run_dir / "loop")

    return [
        BadInput(theme, "is a file", (f"{where}{{f}}/taken",), ("taken",), files={"taken": "a file"}),
        BadInput(theme, "lies below a file", (f"{where}{{f}}/taken/run",), ("taken",), files={"taken": "a file"}),
        BadInput(theme, "cannot be written", (f"{where}/proc/run",), ("/proc/run",)),
        BadInput(theme, "has a name that is too long", (f"{where}{{f}}/{'x' * 300}",), ("xxx",)),
        BadInput(theme, "is a loop of links", (f"{where}{{f}}/run/loop",), ("run/loop",), earlier=loop),
        BadInput(theme, "is null", (f"{where}null",), ("default_local_dir",)),
    ]  # fmt: skip


CASES = [*command_line(), *numbers(), *names(), *folders()]
