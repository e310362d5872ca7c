"""What a compiled block keeps for its backward, where it may not keep all that would be fastest.

Which values are worth their bytes is for torch's partitioner to say, but for three kinds that it is not allowed to
compute again. It takes cuDNN's attention, and operations of other packages, for free, and they would be the first. And
what is drawn at random would be drawn anew (pytorch/pytorch#190758).
"""

import functools
import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

OF_TORCH = ("aten", "prims")


class WithinBudget(CustomPartitionerFn):
    """For `options` of `torch.compile`, under `custom_partitioner_fn`. It may be pickled: kernels on disk are found by
    what it is made of."""

    def __init__(self, budget: float):
        self.budget = budget

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **how: Any) -> tuple:
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        for node in gm.graph.nodes:
            if stays(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with config.patch(activation_memory_budget=self.budget):
            return min_cut_rematerialization_partition(gm, joint_inputs, **how)

    def uuid(self) -> str:
        """By which kernels on disk are found too: another one, where `stays` does something else."""
        return f"verl_omni within budget, 1: {self.budget}"


@functools.cache  # one for all blocks, so that dynamo sees one compiler and shares their graphs
def within_budget(budget: float) -> WithinBudget:
    return WithinBudget(budget)


def stays(node: torch.fx.Node) -> bool:
    """Attention, what is drawn at random, and what is none of torch's own operations."""
    operation = node.target
    if node.op != "call_function" or operation is operator.getitem:
        return False
    if isinstance(operation, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in operation.tags
    return random or "attention" in operation.name() or operation.namespace not in OF_TORCH
