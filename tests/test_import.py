import subprocess
import sys

HEAVY = ("torch", "ray", "verl", "diffusers", "transformers", "vllm", "hydra")


def test_import_loads_nothing_heavy_and_writes_nothing(tmp_path):
    code = f"import sys, verl_omni; print(*[m for m in {HEAVY} if m in sys.modules]); print(verl_omni.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    loaded, version = done.stdout.splitlines()
    assert loaded == "", f"import verl_omni loads {loaded}"
    assert version[0].isdigit()
    assert list(tmp_path.iterdir()) == []
