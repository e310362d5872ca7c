"""Think, then draw: what learns, side by side. Held-out OCR score of numbers that are asked for in words.

    python -m benchmarks.think_then_draw --out outputs/think [--seeds 0 1 2] [--parallel 4]

The rewriter alone, the generator alone, both, and a control of each: the same with scores that are dealt to the wrong
images. Runs that are already whole are not repeated. Prints a table in Markdown.
"""

from benchmarks.task_runs import compare

TASK = "think_then_draw"
LEARN = {name: [f"actor_rollout_ref.rewriter.train={name}"] for name in ("rewriter", "generator", "both")}
# All images of a step are dealt at once: half of a prompt's, dealt among themselves, would still tell by their mean.
DEALT = ["reward.custom_reward_function.path=pkg://verl_omni.quickstart.control", "reward.batch_size=96"]
RUNS = LEARN | {f"{name}_control": [*learns, *DEALT] for name, learns in LEARN.items()}

if __name__ == "__main__":
    compare(TASK, RUNS, 40, __doc__)
