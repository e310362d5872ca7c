"""Two runs on one machine do not meet, and no other program takes their port before they listen."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from composed import composed

from verl_omni.trainer import resources
from verl_omni.trainer.diffusion import processes
from verl_omni.trainer.resources import rendezvous_ports
from verl_omni.utils import cpu_platform

SYSTEMS_OWN = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not SYSTEMS_OWN.exists(), reason="needs Linux")
def test_ports_that_the_system_gives_to_nobody():
    begins = int(SYSTEMS_OWN.read_text().split()[0])
    if begins < 32_768:
        pytest.skip(f"here the system's own ports begin at {begins}")
    ranges = [rendezvous_ports() for _ in range(50)]
    assert all(19_999 < first < last < begins for first, last in ranges)
    assert len({first for first, _ in ranges}) > 40


def test_a_machine_that_is_full_is_said_before_ray_starts(monkeypatch):
    resources.check_memory()
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    with pytest.raises(ValueError, match="memory are in use, more than the 0% .* or raise RAY_memory_usage_threshold"):
        resources.check_memory()


def test_ray_keeps_notes_of_calls_for_a_timeline_only():
    note = "task_events_report_interval_ms"
    assert resources.ray_arguments(composed("trainer.device=cpu"))["_system_config"][note] == 0
    for others in ("ray.timeline_json_file=t.json", "ray.address=h:1"):
        asked = resources.ray_arguments(composed("trainer.device=cpu", others))
        assert note not in asked.get("_system_config", {}) and ("_system_config" in asked) == ("address" not in others)


@pytest.fixture
def back_to_the_cpu():
    yield
    cpu_platform.tell_verl("cpu")


def test_all_processes_of_a_run_are_told_where_it_computes():
    cases = [("cpu", None, "cpu"), ("cpu", "h:1", "cpu"), ("cuda", None, None), ("cuda", "h:1", "nvidia")]
    for device, address, told in cases:
        config = composed(f"trainer.device={device}", f"ray.address={address or 'null'}")
        variables = resources.ray_arguments(config)["runtime_env"]["env_vars"]
        assert variables.get("VERL_PLATFORM") == told
        assert variables.get("CUDA_VISIBLE_DEVICES") == ("" if device == "cpu" else None)


def test_a_driver_without_a_gpu_asks_the_cluster(monkeypatch, back_to_the_cpu):
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", lambda address: address)
    for gpus, device in ((2.0, "cuda"), (0.0, "cpu")):
        nodes = {1: SimpleNamespace(resources_total={"CPU": 4.0}), 2: SimpleNamespace(resources_total={"GPU": gpus})}
        client = SimpleNamespace(get_all_node_info=lambda nodes=nodes: nodes)
        monkeypatch.setattr("ray._raylet.GcsClient", lambda address, client=client: client)
        for own in (True, False):  # of the machine that starts the run, which may be no part of the cluster
            monkeypatch.setattr("torch.cuda.is_available", lambda own=own: own)
            assert resources.choose_device(None, "head:6379") == device
        assert resources.choose_device("cuda", "head:6379") == "cuda", "the cluster may get its GPUs later"
    with pytest.raises(ValueError, match="ray://head:1 cannot be asked for GPUs: set it to cuda or cpu"):
        resources.choose_device(None, "ray://head:1")


def test_workers_on_other_machines_share_the_cores_of_the_smallest(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": True, "Resources": {"CPU": 6.0}}]
    nodes += [{"Alive": True, "Resources": {}}, {"Alive": False, "Resources": {"CPU": 1.0}}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert resources.worker_environment("cpu", 2, "head:6379") == {"OMP_NUM_THREADS": "3"}
    assert resources.worker_environment("cuda", 2, "head:6379") == {}


def test_verl_computes_where_the_run_does(monkeypatch, tmp_path, back_to_the_cpu):
    """Also after a run in the same process that was on the CPU, or with what it left in the environment."""
    from verl.utils.device import get_device_name

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("VERL_PLATFORM")
    resources.choose_device(None)
    assert get_device_name() == "cpu" and os.environ["VERL_PLATFORM"] == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resources.choose_device(None) == "cuda"
    assert get_device_name() == "cuda" and "VERL_PLATFORM" not in os.environ


def test_rays_sockets_have_a_short_path_under_a_long_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert resources.short_folder() is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    folder = resources.short_folder()
    assert len(f"{folder}/session_2026-11-16_16-45-23_802175_4194304/sockets/plasma_store") <= 107
    monkeypatch.setenv("RAY_TMPDIR", "/mine")
    assert resources.short_folder() is None


def test_a_folder_for_ray_that_is_too_long_for_its_sockets_is_told(monkeypatch):
    """As long as Linux lets the path of a socket be, and one more."""
    below = f"/ray/session_2026-11-16_16-45-23_802175_{os.getpid()}/sockets/plasma_store"
    longest = "/".ljust(107 - len(below), "x")
    monkeypatch.setenv("RAY_TMPDIR", longest)
    assert resources.short_folder() is None
    monkeypatch.setenv("RAY_TMPDIR", longest + "x")
    with pytest.raises(ValueError, match=f"^RAY_TMPDIR={longest}x is .* at most {len(longest)} characters$"):
        resources.short_folder()


@pytest.mark.parametrize(
    "addresses, only",
    [(["10.0.0.1"], True), (["10.0.0.1", "10.0.0.2"], False), (["10.0.0.2"], False)],  # the last: asked from elsewhere
)
def test_the_only_machine_finds_the_ports_of_its_ranks_itself(addresses, only, monkeypatch):
    nodes = [{"Alive": True, "NodeManagerAddress": address} for address in addresses]
    gone = {"Alive": False, "NodeManagerAddress": "10.0.0.3"}
    monkeypatch.setattr(processes.ray, "nodes", lambda: [*nodes, gone])
    monkeypatch.setattr(processes.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    assert processes.only_machine() is only


def test_no_process_is_started_to_find_them_and_they_reach_the_ranks(monkeypatch):
    """Through verl's own start of a group, up to where it has asked for them."""
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import get_master_addr_port

    def meet(self, **given):
        self._get_master_addr_port(None, master_port_range=self._ray_master_port_range)

    def refuse(**given):
        raise AssertionError("a process of Ray's for a port")

    monkeypatch.setattr(RayWorkerGroup, "_init_with_resource_pool", meet)
    monkeypatch.setattr(RayWorkerGroup, "_bind_worker_method", lambda *given: [])
    monkeypatch.setattr(get_master_addr_port, "options", refuse)
    monkeypatch.setattr(processes, "only_machine", lambda: True)
    monkeypatch.setattr(processes.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    pool, worker = RayResourcePool([1], use_gpu=False), SimpleNamespace(cls=None, fused_worker_used=False)
    group = processes.Ranks(pool, worker, device_name="cpu", master_port_range=[30200, 30300])
    assert group.master_address == "127.0.0.1" and 30200 <= int(group.master_port) < 30300
