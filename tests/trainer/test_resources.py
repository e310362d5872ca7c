"""Two runs on one machine do not meet, and no other program takes their port before they listen."""

from pathlib import Path

import pytest

from verl_omni.trainer import resources
from verl_omni.trainer.resources import rendezvous_ports

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
