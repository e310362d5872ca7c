"""Who gets which devices: all that a run places is counted together, and nobody waits for what cannot come."""

import os
import sys

import pytest
import ray
from composed import composed
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from tiny_models import tiny_checkpoint
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.trainer.ppo.utils import Role

from verl_omni.config.schema import RewardModelConfig
from verl_omni.rewards.judge import JUDGE, start_judges
from verl_omni.rewards.pool import scorer_pool
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.placement import SERVERS, TRAINING, Placement, Room, Wanted, all_wanted, plan
from verl_omni.utils.errors import RunError

PATHS = os.pathsep.join(path for path in sys.path if path)
EVERYTHING = [
    "trainer.device=cuda", "trainer.nnodes=2", "trainer.n_gpus_per_node=2", "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true",
    "reward.reward_model.n_gpus_per_node=1",
    "reward.scorers=[{name: ocr, processes: 2, gpus: 0.5}, {name: vlm_judge}, {name: pickscore, processes: 1}]",
]  # fmt: skip


def test_everything_is_counted():
    wanted = {one.name: one for one in all_wanted(composed(*EVERYTHING))}
    gpus = {name: (one.on_nodes, one.gpus) for name, one in wanted.items()}
    assert gpus == {
        TRAINING: ((2, 2), 1),
        SERVERS: ((1, 1), 1),
        JUDGE: ((1,), 1),
        scorer_pool("ocr"): ((1, 1), 0.5),
        scorer_pool("pickscore"): ((1,), 0),
    }
    assert [one.name for one in all_wanted(composed(*EVERYTHING, "algorithm.sample_source=offline"))] == [TRAINING]
    on_cpus = all_wanted(composed("trainer.device=cpu", "actor_rollout_ref.hybrid_engine=false"))
    assert [(one.name, one.gpus, one.cpus) for one in on_cpus] == [(TRAINING, 0, 1), (SERVERS, 0, 1)]


def rooms(*gpus: float, cpus: float = 64) -> dict[str, Room]:
    return {f"n{i}": Room.of({"GPU": n, "CPU": cpus}) for i, n in enumerate(gpus)}


FOUR = Wanted("a", "", (4,), 1, 3, apart=True)
ON_TWO = Wanted("b", "", (2, 2), 1, 1, apart=True)
PAIR = Wanted("c", "", (1,), 2)
HALVES = Wanted("d", "", (1, 1, 1), 0.6)


@pytest.mark.parametrize(
    ("wanted", "nodes", "homes"),
    [
        ([FOUR], rooms(2, 4, 8), {"a": ["n1"]}),  # the eight stay whole
        ([ON_TWO], rooms(8), None),  # two nodes are asked for
        ([ON_TWO], rooms(8, 2), {"b": ["n1", "n0"]}),
        ([FOUR, ON_TWO, PAIR], rooms(6, 4), {"a": ["n1"], "b": None, "c": None}),
        ([FOUR, PAIR], rooms(4), None),  # each alone would fit
        ([FOUR, PAIR], rooms(4, 1, 1), None),  # a process is on one node
        ([FOUR, PAIR], rooms(4, 2), {"a": ["n0"], "c": ["n1"]}),
        ([PAIR, FOUR], rooms(2, 4), {"a": ["n1"], "c": ["n0"]}),
        ([HALVES], rooms(2), None),  # 1.8 of 2 GPUs, but no GPU has two of them
        ([HALVES], rooms(3), {"d": ["n0", "n0", "n0"]}),
        ([FOUR], rooms(4, cpus=11), None),
        ([FOUR], rooms(3.5), None),
    ],
)
def test_a_plan_fits_or_there_is_none(wanted, nodes, homes):
    if homes is not None and None in homes.values():
        homes = None
    assert plan(wanted, nodes) == homes


def test_the_runs_folder_is_the_same_for_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = f"actor_rollout_ref.model.path={tiny_checkpoint()}", "data.train_files=prompts.txt", "trainer.device=cpu"
    for typed, meant in (("runs/one", f"{tmp_path}/runs/one"), ("~/../run", "/home/run"), ("/a/run", "/a/run")):
        config = prepare_config(composed(*given, "ray.address=10.0.0.1:6379", f"trainer.default_local_dir='{typed}'"))
        assert config.trainer.default_local_dir == meant


@pytest.fixture(scope="module")
def cluster():
    """Two nodes that say that they have four GPUs each."""
    node = {"num_cpus": 16, "num_gpus": 4, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # else 32 processes, one for each CPU that nodes tell of
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**node)
        ray.init(address=cluster.address, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": PATHS}})
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class Somebody:
    def where(self) -> tuple[str, tuple[int, ...]]:
        return ray.get_runtime_context().get_node_id(), tuple(ray.get_gpu_ids())


Somebody.__module__ = "__main__"  # sent by value: eleven processes would import all of this file for it

def placed(*overrides: str, seconds: float = 60) -> Placement:
    return Placement(all_wanted(composed(*EVERYTHING, *overrides)), {Role.ActorRollout: TRAINING}, seconds)


def free(placement: Placement) -> None:
    for pool in placement.resource_pool_dict.values():
        for group in pool.pgs:
            remove_placement_group(group)


def test_every_process_gets_its_place(cluster, monkeypatch):
    from verl.plugin.platform import get_platform

    monkeypatch.setattr(type(get_platform()), "ray_resource_options", lambda self, gpus: {"num_gpus": gpus})
    placement = placed("reward.reward_model.n_gpus_per_node=1")
    placement.create_resource_pool()
    try:
        somebody = ray.remote(Somebody)
        group = RayWorkerGroup(
            placement.get_resource_pool(Role.ActorRollout), RayClassWithInitArgs(somebody), device_name="cpu"
        )
        training = ray.get([worker.where.remote() for worker in group.workers])
        others = {
            name: [somebody.options(**place).remote() for place in placement.options(name)]
            for name in (SERVERS, JUDGE, scorer_pool("ocr"), scorer_pool("pickscore"))
        }
        found = {name: ray.get([one.where.remote() for one in those], timeout=240) for name, those in others.items()}
        nodes = [node for node, _ in training]
        assert len(set(nodes)) == 2 and nodes[0] == nodes[1] and nodes[2] == nodes[3]
        assert len({node for node, _ in found[SERVERS]}) == 2
        assert [len(gpus) for name in (SERVERS, JUDGE) for _, gpus in found[name]] == [1, 1, 1]
        assert found[scorer_pool("ocr")][0] == found[scorer_pool("ocr")][1], "two halves of one GPU"
        assert found[scorer_pool("pickscore")][0][1] == ()
        whole = [*training, *found[SERVERS], *found[JUDGE], found[scorer_pool("ocr")][0]]
        assert len(set(whole)) == 8, "no GPU is given twice"
    finally:
        free(placement)


def test_what_can_never_be_is_one_line_that_names_every_pool(cluster):
    with pytest.raises(ValueError) as refused:
        placed("reward.reward_model.n_gpus_per_node=2").create_resource_pool()
    assert str(refused.value) == (
        "training 2 on each of 2 nodes (1 GPU and 3 CPUs each; trainer.n_gpus_per_node), rollout servers 1 on each of "
        "2 nodes (1 GPU and 1 CPU each; rollout.n_gpus_per_node), judge 1 (2 GPUs each; "
        "reward.reward_model.n_gpus_per_node), scorer ocr 2 (0.5 GPUs each; reward.scorers) are 9 GPUs and 14 CPUs, "
        "and Ray has 2 nodes with 4 GPUs and 16 CPUs: ask for less, or add devices"
    )


def test_servers_on_more_nodes_than_there_are_are_refused(cluster):
    wanted = "reward.scorers=null", "reward.reward_model.enable=false", "reward.reward_model.enable_resource_pool=false"
    with pytest.raises(ValueError, match="rollout servers 1 on each of 3 nodes .* Ray has 2 nodes with 4 GPUs"):
        placed("actor_rollout_ref.rollout.nnodes=3", *wanted).create_resource_pool()


def test_what_others_hold_is_waited_for_and_not_for_ever(cluster, capfd):
    others = placement_group([{"GPU": 4}])
    ray.get(others.ready())
    try:
        with pytest.raises(ValueError, match="others hold some of it and did not give it back within ray.place"):
            placed(seconds=1).create_resource_pool()
        assert "Waiting for devices that others hold, 1 s at most" in capfd.readouterr().out
    finally:
        remove_placement_group(others)


def test_a_judge_that_gets_no_process_ends_the_run(cluster, tmp_path):
    """Not by its own clock: that one does not run yet."""
    config = RewardModelConfig(enable=True, model_path="m", command=f"{sys.executable} -c ''", start_timeout=0.1)
    with pytest.raises(RunError, match=r"no process for judge 0 of 1 within 0.6 s .reward.reward_model.start_timeout"):
        start_judges(config, str(tmp_path), [{"num_cpus": 0, "num_gpus": 64}], patience=0.5)
