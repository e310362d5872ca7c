"""MixGRPO (arXiv 2507.21802): Flow-GRPO whose stochastic window moves over training, from noise to detail.

Settings only. `rollout.algo.sde_window_schedule` is random, progressive, decay or exp_decay; see
`pipelines/schedulers/windows.py` for where a window then lies.
"""

from verl_omni.algorithms.registry import Algorithm, register_algorithm

register_algorithm(
    Algorithm(
        name="mix_grpo",
        rollout={
            "sde_type": "sde",
            "noise_level": 0.7,
            "sde_window_size": 2,
            "sde_window_schedule": "progressive",
            "sde_window_iters": 25,
            "sde_window_stride": 1,
        },
        description="MixGRPO: an SDE window that moves over training, ODE elsewhere",
    )
)
