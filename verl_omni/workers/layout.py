"""Who holds what: the ranks that train, divided in one place for the driver and for every worker."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Under this name verl's dispatch asks each worker for its place.
ROWS = "rows"


@dataclass(frozen=True)
class Layout:
    """`replicate` copies of the weights, each cut into `shard` * `sequence` parts.

    `sequence` ranks beside each other work on the same rows: they share each sample's tokens among them. All other
    ranks have rows of their own.
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.sequence

    @property
    def data(self) -> int:
        """How many ranks have rows of their own: the data-parallel degree."""
        return self.replicate * self.shard

    @property
    def is_spread(self) -> bool:
        """Whether there is anything to share: a single rank trains the module as it is."""
        return self.world > 1

    @property
    def parts(self) -> int:
        """How many ranks hold one copy of the weights, a part each."""
        return self.shard * self.sequence

    def data_rank(self, rank: int) -> int:
        """Whose rows a rank works on."""
        return rank // self.sequence

    def speaks(self, rank: int) -> bool:
        """One rank answers for all that work on the same rows, so that a sample counts once."""
        return rank == self.speaker(rank)

    def speaker(self, rank: int) -> int:
        """The one that answers for this rank: the first of those that work on the same rows."""
        return rank - rank % self.sequence

    @property
    def speakers(self) -> list[int]:
        """The ranks that answer, in the order of their rows."""
        return [rank for rank in range(self.world) if self.speaks(rank)]

    def ranks_of_rows(self, rows: int) -> list[int]:
        """The data rank of each of so many rows, dealt in equal blocks."""
        return [row * self.data // rows for row in range(rows)]

    def weights(self, device_type: str) -> DeviceMesh:
        """Over which weights are cut: `shard`, within each of the copies, `replicate`, where there are several."""
        if self.replicate == 1:
            return init_device_mesh(device_type, (self.parts,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (self.replicate, self.parts), mesh_dim_names=("replicate", "shard"))

    def samples(self, device_type: str) -> DeviceMesh:
        """Over which samples are cut: `sequence`, within each of the ranks that have rows of their own, `data`."""
        return init_device_mesh(device_type, (self.data, self.sequence), mesh_dim_names=("data", "sequence"))

    def attention(self, device_type: str) -> DeviceMesh:
        """The same for diffusers, which has two ways to share tokens: a `ring`, here of one, and `ulysses`."""
        mesh = init_device_mesh(device_type, (self.data, 1, self.sequence), mesh_dim_names=("data", "ring", "ulysses"))
        return mesh["ring", "ulysses"]

    def group(self, name: str, backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """A new group, this rank's own: of `sequence`, who work on the same rows, or of `weights`, who hold one copy.

        All ranks ask for the same groups, in the same order.
        """
        size = {"sequence": self.sequence, "weights": self.parts}[name]
        own, _ = dist.new_subgroups(size, backend=backend, timeout=timeout)
        return own
