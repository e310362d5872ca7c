"""The modes of `trainer.mode`, and the pace of each."""

from verl_omni.trainer.diffusion.fully_async import FullyAsync
from verl_omni.trainer.diffusion.pace import OneStepOff, Pace

PACES: dict[str, type[Pace]] = {
    "colocated": Pace,
    "separate": Pace,
    "one_step_off": OneStepOff,
    "fully_async": FullyAsync,
}
