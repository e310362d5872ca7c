"""The judge that a run starts by default, `vllm serve`, for real: killed in the middle of a run, and started again.

    python -m benchmarks.judge_on_gpu outputs/judge          # a machine with one GPU or more, and vllm
    python -m benchmarks.judge_on_gpu outputs/judge --memory 0.15  # beside others: its share of the GPU
    python -m benchmarks.judge_on_gpu outputs/judge --only-write   # the judge's folder alone, anywhere

Writes a small vision-language model of random weights (LLaVA) that says one digit from 1 to 5 of an image, and a tiny
Stable Diffusion 3. The run trains the second with `vlm_judge` as its reward, on a Ray that this script starts: on a
machine with one GPU it says that there are two, and training and judge then share it. After a few steps the server is
killed. Prints what happened, and ends with an error where a score is missing or the server did not come back. While the
server starts nobody else may give memory of its GPU back, or it ends.
"""

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from benchmarks.soak import SMALL, prepare
from verl_omni.config.schema import RewardModelConfig

WIDTH = 256  # four heads of 64, which every attention kernel has
STEPS, KILL_AFTER = 12, 3
SCORER = "{name: vlm_judge, template: 'How good is it: {prompt}?', parser: number, scale: 1..5, max_tokens: 4}"
CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endfor %} Answer:"
)


def write_judge(folder: Path) -> None:
    """A LLaVA that says one digit and then ends, whatever it is asked; which digit depends on image and question."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    special = ["<pad>", "<s>", "</s>", "<image>"]
    ids = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytewise = Tokenizer(models.BPE(vocab=ids, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    layers = {"num_hidden_layers": 2, "num_attention_heads": WIDTH // 64}
    seen = CLIPVisionConfig(
        **layers, hidden_size=WIDTH, intermediate_size=WIDTH, image_size=32, patch_size=8, projection_dim=WIDTH
    )
    said = LlamaConfig(
        **layers, hidden_size=WIDTH, intermediate_size=WIDTH, num_key_value_heads=WIDTH // 64, vocab_size=len(ids),
        max_position_embeddings=2048, bos_token_id=ids["<s>"], eos_token_id=ids["</s>"], pad_token_id=ids["<pad>"],
        initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=seen, text_config=said, image_token_id=ids["<image>"], tie_word_embeddings=False)
    )
    say_one_digit(model, [ids[digit] for digit in "12345"], ids["</s>"])
    model.to(torch.bfloat16).save_pretrained(folder)
    name_as_published(folder / "model.safetensors")
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=CHAT,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip


def name_as_published(file: Path) -> None:
    """As in published folders, which vLLM knows; transformers 5 leaves a level out."""
    from safetensors.torch import load_file, save_file

    weights = {k.replace("vision_tower.", "vision_tower.vision_model.", 1): v for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


@torch.no_grad()
def say_one_digit(model: torch.nn.Module, digits: list[int], end: int) -> None:
    """The first number of the hidden state says whether the last token was a digit, and nothing else writes to it."""
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.mul_(20)  # so that the answer depends on the image
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
    embeddings[:, 0] = 0
    embeddings[digits, 0] = 100
    directions = torch.randn(3, WIDTH)
    directions[:, 0] = 0
    head.zero_()  # what is no digit is never said: of a direction and its opposite, one is above 0
    head[digits] = torch.cat([directions, -directions[:2]])
    head[end, 0] = 100
    for linear in (model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2):
        linear.weight.mul_(10)


def check_late_imports() -> None:
    """What `vllm serve` imports only after it has loaded its model."""
    late = ("blake3", "prometheus_fastapi_instrumentator", "uvicorn", "watchfiles")
    if missing := [name for name in late if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: vllm serve needs {', '.join(missing)}: pip install {' '.join(missing).replace('_', '-')}")


def with_command(folder: Path) -> dict[str, str]:
    """The environment in which there is a `vllm` that starts, also where the package was only unpacked."""
    environment = dict(os.environ)
    if importlib.util.find_spec("flashinfer") is None:
        print("flashinfer, which vllm samples with, is not installed: VLLM_USE_FLASHINFER_SAMPLER=0")
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if shutil.which("vllm"):
        return environment
    command = folder / "bin/vllm"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return environment | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}


def start_ray(environment: dict[str, str], port: int) -> subprocess.Popen:
    """With two GPUs, or with one that is there twice. It ends with the process that comes back."""
    gpus = torch.cuda.device_count()
    shared = environment | {"CUDA_VISIBLE_DEVICES": "0,0" if gpus == 1 else "0,1"}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    process = subprocess.Popen([*ray, "--num-gpus=2", "--num-cpus=12", "--include-dashboard=false"], env=shared)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return process
        except OSError:  # it does not listen yet
            time.sleep(0.5)
    sys.exit(f"error: ray start ended with {process.returncode}")


def servers(judge: Path) -> list[psutil.Process]:
    """The processes that are `vllm serve` of this model; its engines have other names."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "serve" in words and str(judge) in words and any("vllm" in word for word in words):
            found.append(process)
    return found


def steps(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return [data for data in (json.loads(line)["data"] for line in lines) if "reward/vlm_judge/mean" in data]


def train(folder: Path, judge: Path, environment: dict[str, str], port: int, memory: float | None) -> int:
    """The run, and the kill. Prints what is seen, with its time."""
    run, began = folder / "run", time.monotonic()
    shutil.rmtree(run, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "verl_omni.trainer.main_diffusion", *prepare(folder), *SMALL),
        *(f"trainer.default_local_dir={run}", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=0"),
        *(f"ray.address=127.0.0.1:{port}", "trainer.device=cuda", f"reward.scorers=[{SCORER}]"),
        *("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true"),
        *("reward.reward_model.n_gpus_per_node=1", f"reward.reward_model.model_path={judge}"),
    ]
    if memory:
        default = RewardModelConfig().command
        command.append(f"reward.reward_model.command='{default} --gpu-memory-utilization {memory}'")

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    process = subprocess.Popen(command, env=environment)
    killed, known, done = False, set(), 0
    while process.poll() is None:
        for server in servers(judge):
            if server.pid not in known:
                known.add(server.pid)
                tell(f"vllm serve is process {server.pid}")
        if len(steps(run)) > done:
            done = len(steps(run))
            tell(f"step {done}: reward {steps(run)[-1]['reward/vlm_judge/mean']:.3f}")
        if done >= KILL_AFTER and not killed:
            (server,) = servers(judge)
            server.kill()
            killed = True
            tell(f"killed {server.pid}")
        time.sleep(0.2)
    found = steps(run)
    tell(f"the run ended with {process.returncode} after {len(found)} steps; {len(known)} servers were seen")
    failed = sum(step["reward/failed"] for step in found)
    whole = process.returncode == 0 and killed and len(found) == STEPS and len(known) == 2 and failed == 0
    if not whole:
        print((run / "reward_model_0.log").read_text()[-4000:] if (run / "reward_model_0.log").exists() else "no log")
    return 0 if whole else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--only-write", action="store_true", help="make the judge's folder, and end")
    parser.add_argument("--port", type=int, default=6399, help="of Ray (%(default)s)")
    parser.add_argument("--memory", type=float, help="share of the GPU's memory that vllm may take; else its default")
    options = parser.parse_args()
    folder = options.folder.absolute()
    judge = folder / "judge"
    write_judge(judge)
    if options.only_write:
        return
    if not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU here, and vllm serve needs one: use --only-write")
    check_late_imports()
    environment = with_command(folder) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = start_ray(environment, options.port)
    try:
        code = train(folder, judge, environment, options.port, options.memory)
    finally:
        ray.terminate()
        ray.wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
