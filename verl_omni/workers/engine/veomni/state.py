"""Who shares tokens with whom, as VeOmni's forward passes ask for it: one answer for the whole process."""

from veomni.distributed.parallel_state import ParallelState, init_parallel_state, set_parallel_state

from verl_omni.workers.layout import Layout


class SharedState:
    """Gradients of ranks that share a sample are each that of the whole group, for the parameters that a rank used:
    their mean, which FSDP2 takes, is the sample's."""

    def __init__(self, layout: Layout, device_type: str):
        self.shared = init_parallel_state(
            dp_size=layout.data,
            dp_replicate_size=layout.replicate,
            dp_shard_size=layout.shard,
            ulysses_size=layout.sequence,
            dp_mode="fsdp2",
            device_type=device_type,
            name=None,
        )
        self.alone = ParallelState(dp_size=layout.world, dp_shard_size=layout.world, device_type=device_type)
        self.go_on()

    def pause(self) -> None:
        """From now on every rank computes whole samples of its own."""
        set_parallel_state(self.alone)

    def go_on(self) -> None:
        set_parallel_state(self.shared)
