"""What follows a training step, each its own callback. Their order is the trainer's (`_after_step`)."""

from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm

from verl_omni.report.notices import notice
from verl_omni.report.timeline import Timeline
from verl_omni.report.tracking import Tracking
from verl_omni.rewards.choice import read_choices, weighted
from verl_omni.trainer.callbacks import Callback, Run, Step
from verl_omni.trainer.diffusion.diffusion_metric_utils import (
    compute_data_metrics_diffusion,
    compute_mfu_metrics,
    compute_throughput_metrics_diffusion,
    compute_timing_metrics_diffusion,
)
from verl_omni.trainer.diffusion.idle import Balance, shares
from verl_omni.trainer.diffusion.reward_metrics import RewardWatch, reward_metrics
from verl_omni.trainer.diffusion.validation import write_training_samples
from verl_omni.trainer.progress import progress, tell, timer
from verl_omni.trainer.run_folder import wishes
from verl_omni.trainer.run_folder.checkpoints import Checkpoints
from verl_omni.trainer.run_folder.log import terminal
from verl_omni.trainer.run_folder.saving import is_due
from verl_omni.utils.readable import readable


def follow(callbacks: Iterable[Callback], run: Run, step: Step) -> None:
    """All of them, in order. Where one fails the step is done nevertheless, and its line is written."""
    failure: BaseException | None = None
    for callback in callbacks:
        if failure is None or isinstance(callback, Speed | Log):
            try:
                callback.on_step_end(run, step)
            except BaseException as error:  # raised below
                failure = failure or error
    if failure is not None:
        raise failure
    if step.end is not None:
        raise step.end


class Scores(Callback):
    """Rewards and advantages in numbers, and a word on the console where a reward looks wrong."""

    def __init__(self, scorers: Any):
        """`reward.scorers`."""
        self.weights = weighted(read_choices(scorers))
        self.watch = RewardWatch(self.weights)

    def on_step_end(self, run: Run, step: Step) -> None:
        step.metrics |= compute_data_metrics_diffusion(step.batch) | reward_metrics(step.batch, self.weights)
        for line in self.watch.see(step.metrics):
            notice(run.folder, line, step.number)


class KeptSamples(Callback):
    """Of some prompts the best and the worst sample are kept."""

    def on_step_end(self, run: Run, step: Step) -> None:
        write_training_samples(step.batch)


class Waiting(Callback):
    """Where training and rollout overlap: which of them waits for the other."""

    def __init__(self, training: int, rollout: int):
        self.balance = Balance(training, rollout)

    def on_step_end(self, run: Run, step: Step) -> None:
        step.metrics |= shares(step.timing)
        if line := self.balance.see(step.timing):
            notice(run.folder, line)


class Validation(Callback):
    """Every `trainer.test_freq` steps, when what is being drawn has been drawn."""

    def __init__(self, checkpoints: Checkpoints, settle: Callable[[], None], validate: Callable[[], dict[str, float]]):
        self.checkpoints, self.settle, self.validate = checkpoints, settle, validate

    def on_step_end(self, run: Run, step: Step) -> None:
        if not is_due(step.number, run.config.trainer.test_freq, step.last):
            return
        self.checkpoints.whole.validation_due = True  # the step may be saved without it
        with timer(step.timing, "settle"):
            self.settle()
        with timer(step.timing, "testing"):
            step.metrics |= self.validate()
        step.metrics |= self.checkpoints.validated(step.metrics)
        self.checkpoints.whole.validation_due = False


class Speed(Callback):
    """Seconds of every stage, samples a second, FLOP/s."""

    def __init__(self, devices: int):
        self.devices = devices

    def on_step_end(self, run: Run, step: Step) -> None:
        step.metrics |= compute_mfu_metrics(step.metrics, step.timing)
        step.metrics |= compute_timing_metrics_diffusion(step.timing, len(step.batch))
        step.metrics |= compute_throughput_metrics_diffusion(step.batch, step.timing, self.devices)
        step.metrics["training/global_step"] = step.number


class Log(Callback):
    """The step's line, to all trackers and to the timeline."""

    def __init__(self, tracking: Tracking, timeline: Timeline):
        self.tracking, self.timeline = tracking, timeline

    def on_step_end(self, run: Run, step: Step) -> None:
        self.tracking.log(step.metrics, step=step.number)
        self.timeline.add_stages(step.timing.spans)
        self.timeline.write(step.number)


class Save(Callback):
    """After the line is written: a run that goes on from this checkpoint keeps all lines up to it."""

    def __init__(
        self, checkpoints: Checkpoints, save: Callable[[bool], None], see_to: Callable[[], None], tracking: Tracking
    ):
        self.saving, self.save, self.see_to, self.tracking = checkpoints.saving, save, see_to, tracking

    def on_step_end(self, run: Run, step: Step) -> None:
        self.see_to()
        wishes.heed_stop(run.folder)
        wanted = wishes.wants_save(run.folder)
        if wanted or self.saving.is_due(step.number, step.last):
            seconds: dict[str, float] = {}
            with timer(seconds, "save_checkpoint"):
                self.save(step.last or wanted)
            self.tracking.log({"timing_s/save_checkpoint": seconds["save_checkpoint"]}, step=step.number)


class Bar(Callback):
    """On a terminal; in a log file there are lines, and no bar."""

    def __init__(self, run: Run):
        self.bar = tqdm(
            total=run.total_steps, initial=run.step, desc="training", unit="step", file=terminal(), disable=None
        )

    def on_step_end(self, run: Run, step: Step) -> None:
        reward = step.metrics.get("critic/rewards/mean")  # cached pairs have none
        shown = {} if reward is None else {"reward": readable(reward)}
        self.bar.set_postfix(shown | {"step": f"{step.timing['step']:.1f}s"})
        self.bar.update()
        tell(done=progress.done + 1)

    def close(self) -> None:
        self.bar.close()
