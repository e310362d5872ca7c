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


def test_rays_sockets_have_a_short_path_under_a_long_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert resources.short_folder() is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    folder = resources.short_folder()
    assert len(f"{folder}/session_2026-11-16_16-45-23_802175_4194304/sockets/plasma_store") <= 107
    monkeypatch.setenv("RAY_TMPDIR", "/mine")
    assert resources.short_folder() is None
