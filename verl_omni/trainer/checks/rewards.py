"""Whether the rewards of a run can score what it draws, found before a worker starts."""

import importlib.util
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.utils.hub import model_folder
from verl_omni.utils.suggest import nearest, unknown

# Of the run's own judge, whose port comes later.
JUDGE = "http://127.0.0.1"


def check_reward_manager(config: DictConfig) -> None:
    """It is there, and it is for images: verl's own are for text."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    import verl_omni.rewards.image_manager  # noqa: F401  (registers "image")
    from verl_omni.utils.time_limit import time_limit

    manager = config.reward.reward_manager
    if manager.source == "register":
        known = [name for name, cls in REWARD_MANAGER.items() if not cls.__module__.startswith("verl.")]
        if manager.name not in known:
            raise ValueError(unknown("reward.reward_manager.name", manager.name, known))
        return
    if not manager.module.path:
        raise ValueError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path=<file.py>")
    try:
        with time_limit(config.reward.timeout):
            resolve_reward_manager_cls(config)
    except Exception as error:
        raise ValueError(
            f'reward.reward_manager.module.path="{manager.module.path}" gives no class "{manager.name}" '
            f"(reward.reward_manager.name): {type(error).__name__}: {error}"
        ) from error


def check_served(served: DictConfig, device: str) -> None:
    """It has a model, and devices where there are any."""
    from verl_omni.rewards.torch_models import refuse_code_of

    if not served.model_path:
        raise ValueError("reward.reward_model.enable=true needs reward.reward_model.model_path=<the judge's folder>")
    setting = "reward.reward_model.model_path"
    folder = os.path.expanduser(model_folder(served.model_path, weights=False, setting=setting))
    if os.path.isdir(folder) and "trust" not in served.command:  # --trust-remote-code is its user's own decision
        refuse_code_of(f'{setting}="{served.model_path}"', folder)
    if served.enable_resource_pool and not served.n_gpus_per_node:
        raise ValueError(
            "reward.reward_model.enable_resource_pool=true gives the judge GPUs of its own: say how many, "
            "reward.reward_model.n_gpus_per_node=1"
        )
    if device != "cuda" and served.n_gpus_per_node:
        raise ValueError(
            f"reward.reward_model.n_gpus_per_node={served.n_gpus_per_node}: there is no GPU here "
            f"(trainer.device={device}), and the judge would wait for one; leave it and enable_resource_pool out"
        )
    if device == "cuda" and not (served.enable_resource_pool and served.n_gpus_per_node):
        raise ValueError(
            "reward.reward_model.enable=true: the judge does not share the training's GPUs; give it its own with "
            "reward.reward_model.enable_resource_pool=true reward.reward_model.n_gpus_per_node=1, or start a server "
            "yourself and name it in reward.scorers.vlm_judge.address"
        )


def check_ground_truth(choice: Any, rows: list[dict[str, Any]]) -> None:
    """A reward that compares with the ground truth has one in every row."""
    from verl_omni.rewards.registry import reads

    if "ground_truth" not in reads(choice.name):
        return
    for row in rows:
        if row["reward_model"].get("ground_truth") is None:
            near = nearest("ground_truth", row["extra_info"]).replace("Did you mean", "Is it the column").rstrip()
            raise ValueError(
                f'the reward "{choice.label}" compares with the ground truth, and the prompt "{row["prompt"][:60]}" '
                f"has none: give the rows a column ground_truth, or choose another reward.{near}".removesuffix(".")
            )


def check_rewards(config: DictConfig) -> None:
    """The user's reward function loads and takes what it will be given, or every data source has a reward. So has
    validation, where other rewards are named for it."""
    from verl_omni.algorithms.registry import get_diffusion_loss_fn
    from verl_omni.data.loading import load_datasets
    from verl_omni.rewards.validation import has_own
    from verl_omni.trainer.checks.reward_trial import made_kind
    from verl_omni.utils.responses import KINDS
    from verl_omni.utils.responses import check_package as check_written

    check_reward_manager(config)
    check_judge(config)
    asked = config.actor_rollout_ref.rollout.http.port is not None
    if config.trainer.log_train_groups or config.data.val_files or asked:  # else no file is made of any response
        check_written(KINDS[made_kind(config)])
        if made_kind(config) == "video" and importlib.util.find_spec("av") is None:
            print("videos are kept as animations (GIF); as mp4 files with: pip install 'verl-omni[video]'", flush=True)
    datasets = [dataset for dataset in load_datasets(config) if dataset is not None]
    loss = get_diffusion_loss_fn(config.actor_rollout_ref.actor.diffusion_loss.loss_mode)
    follows = "predicted_reward" in loss.required_model_output_keys
    _check_rewards(config, datasets[:1] if has_own(config) else datasets, follows)
    if has_own(config):
        check_validation(config, datasets[-1])


def check_validation(config: DictConfig, prompts: Any) -> None:
    """As the rewards of training, of the prompts of validation."""
    from verl_omni.rewards.validation import for_validation

    own = for_validation(config)
    for label, choice in read_choices_of(own).items():
        if choice.processes:
            raise ValueError(
                f"reward.validation.scorers.{label}.processes has no effect: the reward.num_workers processes score "
                "what validation draws; leave it out"
            )
    try:
        _check_rewards(own, [prompts])
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        raise type(error)(f"reward.validation: {error}") from None


def check_judge(config: DictConfig) -> None:
    """It has a model, devices where there are any, and a reward that asks it."""
    from verl_omni.rewards.validation import for_validation

    if not config.reward.reward_model.enable:
        return
    check_served(config.reward.reward_model, config.trainer.device)
    if not asks_judge(config) and not asks_judge(for_validation(config)):
        raise ValueError(
            "reward.reward_model.enable=true starts a judge that nobody asks: name it as a reward, "
            "'reward.scorers=[{name: vlm_judge}]'"
        )


def asks_judge(config: DictConfig) -> bool:
    """Whether a reward may ask the run's own judge; what a function of the user's does, nobody knows."""
    from verl_omni.rewards.judge import with_judge

    named = read_choices_of(config)
    return bool(config.reward.custom_reward_function.path) or with_judge(named, JUDGE, "") != named


def read_choices_of(config: DictConfig) -> dict[str, Any]:
    """`reward.scorers`, as they are read."""
    from verl_omni.rewards.choice import read_choices

    scorers = config.reward.scorers
    return read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)


def _check_rewards(config: DictConfig, datasets: list[Any], follows: bool = False) -> None:
    """The rewards of these rows; `follows`: the loss climbs their gradient."""
    from verl_omni.data.prompt_rows import NO_SOURCE
    from verl_omni.rewards import check_package, check_settings, get_reward_fn
    from verl_omni.rewards.choice import OWN, rewards_of, weighted
    from verl_omni.rewards.differentiable import check_differentiable
    from verl_omni.rewards.judge import with_judge
    from verl_omni.rewards.reward_loop import load_custom_reward_function
    from verl_omni.rewards.scoring import as_reward_function
    from verl_omni.trainer.checks.reward_trial import scored_kind, try_gradient
    from verl_omni.utils.responses import KINDS

    choices, served = read_choices_of(config), config.reward.reward_model
    if served.enable:
        choices = with_judge(choices, JUDGE, served.model_path)
    for choice in choices.values():
        if choice.name == OWN and (choice.settings or choice.processes):
            given = next(iter(choice.settings), "processes")
            raise ValueError(
                f"reward.scorers.{choice.label}.{given} has no effect on a function of your own: its arguments are "
                f"reward.{OWN}.reward_kwargs, its processes reward.num_workers"
            )
        if choice.name != OWN:
            check_settings(choice.name, choice.settings, choice.label)
            check_package(choice.name)
    function, kind = load_custom_reward_function(config.reward), KINDS[scored_kind(config)]
    own = function is not None
    if own:
        function.check_takes(kind)
    if config.reward.pairwise.by == "pair" and kind.name not in ("image", "video"):
        raise ValueError(f"reward.pairwise.by=pair compares pictures, and rewards are given {kind.name}: use by=score")
    if config.reward.pairwise.by == "group" and not (own and function.batched):
        raise ValueError(
            "reward.pairwise.by=group shows a function of yours all images of a prompt at once: name one in "
            "reward.custom_reward_function.path that takes `images`, or leave it out"
        )
    if own and function.compares and config.reward.pairwise.by != "pair":
        raise ValueError(
            f"reward function {function.name} compares two images (`other`): set reward.pairwise.by=pair, or take that "
            "parameter out"
        )
    added_up = weighted(choices)
    named = any(choice.name == OWN for choice in choices.values())
    if named and not own:
        raise ValueError(f"reward.scorers has {OWN}: say where it is, reward.{OWN}.path=<file.py>")
    if own and choices and not (named and added_up):
        raise ValueError(
            f"reward.scorers.{next(iter(choices))} is for the reward of a data_source, and reward.{OWN} takes its "
            f"place: give its settings in reward_kwargs there, or add both up with {{name: {OWN}, weight: 1}} in "
            "reward.scorers"
        )
    if follows:
        check_differentiable(config.reward)
    rows = [dataset[i] for dataset in datasets for i in range(len(dataset))]
    if follows and own:
        try_gradient(config, function, rows[0])
    sources = {row["data_source"] for row in rows}
    used = set()
    for source in sources:
        if source == NO_SOURCE and not added_up and not own:
            raise ValueError(
                "no reward is named: the prompts have no data_source, so set "
                "reward.custom_reward_function.path=FILE.py or reward.scorers=[{name: ...}] (`verl-omni rewards` lists "
                "them)"
            )
        chosen = rewards_of(source, choices, own)
        used |= {choice.label for choice in chosen}
        for choice in chosen:
            if choice.name != OWN:
                get_reward_fn(choice.name)
                check_package(choice.name)
                check_settings(choice.name, choice.settings, choice.label)
                as_reward_function(None, choice).check_takes(kind)
                check_ground_truth(choice, [row for row in rows if row["data_source"] == source])
    for label, choice in choices.items():
        for source in choice.data_sources or ():
            if source not in sources:
                raise ValueError(
                    f"reward.scorers.{label}.data_sources: {unknown('data_source of the prompts', source, sources)}"
                )
        if label not in used:
            raise ValueError(f"reward.scorers.{label}: {unknown('data_source of the prompts', label, sources)}")
