"""A melody: the score of its pitch, and the control whose scores are dealt to the wrong sounds.

    python -m benchmarks.melody --out outputs/melody [--seeds 0 1 2] [--parallel 2]

Runs that are already whole are not repeated. Prints a table in Markdown.
"""

from benchmarks.task_runs import compare

TASK = "melody"
RUNS = {
    "flow_grpo": [],
    "half_the_learning_rate": ["actor_rollout_ref.actor.optim.lr=3e-4"],
    "control": ["reward.custom_reward_function.path=pkg://verl_omni.quickstart.melody.control"],
}

if __name__ == "__main__":
    compare(TASK, RUNS, 40, __doc__)
