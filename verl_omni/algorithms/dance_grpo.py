"""DanceGRPO (arXiv 2505.07818): Flow-GRPO with noise of constant strength on a random subset of the steps.

Settings only: all images of a prompt start from the same noise, advantages are divided by their group's standard
deviation, and `algorithm.timestep_fraction` of the steps are trained.
"""

from verl_omni.algorithms.registry import Algorithm, register_algorithm

register_algorithm(
    Algorithm(
        name="dance_grpo",
        rollout={"sde_type": "dance_sde", "noise_level": 0.3, "same_initial_noise": True},
        algorithm={"global_std": False, "timestep_fraction": 0.6},
        description="DanceGRPO: constant noise, group standard deviation, a random subset of steps",
    )
)
