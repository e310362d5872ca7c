"""How fast GPUs have been measured to be at what a training step does: the only place where such figures are.

Every row says where it was measured. A GPU without rows of its own is taken to be slower than the H200 as its data
sheet says (`verl_omni.perf.flops.PEAKS`), and a plan says that nobody has measured it.
"""

import dataclasses
from dataclasses import dataclass

from verl_omni.perf.flops import PEAKS

MEASURED = "H200"


@dataclass(frozen=True)
class Rates:
    """FLOP/s of compiled blocks by stage, with forwards that fill the card; of the VAE in `decode`."""

    denoise: float
    reference: float
    update: float
    decode: float
    #: seconds in which the host launches one block, forward and backward: a smaller forward waits for it
    launch_forward: float
    launch_backward: float
    where: str
    #: how many times as fast compiled blocks denoise in 8 bits
    eight_bits: float = 1.10  # the least that was measured

    def scaled(self, factor: float) -> "Rates":
        speeds = {name: getattr(self, name) * factor for name in ("denoise", "reference", "update", "decode")}
        return dataclasses.replace(self, **speeds)


# docs/performance.md, H200, torch 2.11. Denoising: the rollout's rate over the share that is no VAE and no waiting.
H200 = {
    "StableDiffusion3Pipeline": Rates(
        511e12, 514e12, 398e12, 370e12, 0.8e-3, 5.0e-3, "SD3.5-medium with LoRA, 512 x 512, 22 and 44 rows", 1.25
    ),
    "QwenImagePipeline": Rates(
        565e12, 565e12, 420e12, 150e12, 4.4e-3, 4.6e-3, "Qwen-Image with LoRA, 512 x 512, 16 and 8 rows", 1.40
    ),
    # Of the next three denoising, VAE and update were timed, of FLUX.2-klein the whole step: it is shared out as above.
    "WanPipeline": Rates(
        557e12, 557e12, 417e12, 141e12, 0.8e-3, 5.0e-3, "a step of Wan2.1 1.3B with LoRA, 17 frames of 512 x 512",
        1.10,
    ),
    "FluxPipeline": Rates(
        542e12, 542e12, 444e12, 298e12, 0.8e-3, 5.0e-3, "a step of FLUX.1-dev with LoRA, 512 x 512", 1.43
    ),
    "ZImagePipeline": Rates(
        586e12, 586e12, 442e12, 275e12, 0.8e-3, 5.0e-3, "a step of Z-Image with LoRA, 512 x 512", 1.53
    ),
    "Flux2KleinPipeline": Rates(
        610e12, 610e12, 475e12, 370e12, 0.8e-3, 5.0e-3, "a step of FLUX.2-klein 4B with LoRA, 512 x 512"
    ),
    # shared out as Wan2.2 A14B's, which has checkpointing too
    "Flux2Pipeline": Rates(
        615e12, 615e12, 585e12, 370e12, 0.8e-3, 5.0e-3, "a step of FLUX.2-dev with LoRA and checkpointing, 512 x 512"
    ),
    # 4.1 s of this step are its language model's, which no plan counts
    "GlmImagePipeline": Rates(
        600e12, 600e12, 481e12, 370e12, 0.8e-3, 5.0e-3, "what draws of a step of GLM-Image with LoRA, 512 x 512"
    ),
    "QwenImageEditPlusPipeline": Rates(
        551e12, 551e12, 450e12, 150e12, 4.4e-3, 4.6e-3, "a step of Qwen-Image-Edit with LoRA and checkpointing"
    ),
}
# Of an architecture of several sizes, from so many parameters on: matrix products of large ones fill the card better.
# Of the 5B 2,810 TFLOP of denoising took 4.9 s, 936 of the VAE 2.9 s and 612 of an update 1.36 s. Of the A14B 20,354
# took 36.8 s, what the VAE is reckoned to do 1.5 s, and 7,107 of an update, with the forwards that checkpointing
# computes again, 13.5 s.
LARGER = {
    "WanPipeline": [
        (4e9, Rates(573e12, 573e12, 450e12, 323e12, 0.8e-3, 5.0e-3, "a step of Wan2.2 TI2V 5B with LoRA, 49 frames")),
        (10e9, Rates(
            553e12, 553e12, 526e12, 147e12, 0.8e-3, 5.0e-3, "a step of Wan2.2 A14B with LoRA, 33 frames of 480 x 832"
        )),
    ],
}  # fmt: skip
OTHERS = "StableDiffusion3Pipeline"
NO_8_BITS = {"a100", "a800"}  # of the GPUs that are known here: older than compute capability 8.9
# Blocks that are not compiled, as a share of those that are: rollout and update of SD3.5-medium, the same page.
EAGER_FORWARD, EAGER_UPDATE = 4.19 / 9.46, 4.69 / 9.98
# What a rollout takes beside forwards and the VAE, in seconds: the same page, both models.
ROLLOUT_OVERHEAD = 0.4
# Bytes a second of pinned memory to the device and back: 126 GB in 5.2 s of a step of SD3.5-medium, all weights trained
# and everything offloaded, and 82 GB in 3.5 s of one of Qwen-Image with LoRA, the same page.
TO_HOST = 25e9
# GB/s of one GPU to the others of its machine, and to other machines: data sheets (NVLink 4, 400 Gbit/s), not measured.
WITHIN_MACHINE, BETWEEN_MACHINES = 450e9, 50e9
GPUS_A_MACHINE = 8


def rates(gpu: str, architecture: str | None, parameters: float = 0) -> Rates:
    """Of a GPU by its name, such as h200, and a model of so many; of one that nobody has timed, those of another."""
    names = {name.lower(): name for name in PEAKS}
    if gpu.lower() not in names:
        raise ValueError(f"--gpu={gpu}: expected one of {', '.join(names)}")
    name = names[gpu.lower()]
    larger = [one for least, one in LARGER.get(architecture or "", []) if parameters >= least]
    found = larger[-1] if larger else H200.get(architecture or "")
    where = f"{MEASURED}: {found.where}" if found else f"{MEASURED}: {H200[OTHERS].where}; this model was not timed"
    found = found or H200[OTHERS]
    if name != MEASURED:
        where += f"; {name} not timed: taken to be {PEAKS[name] / PEAKS[MEASURED]:.2g} times as fast, by its data sheet"
    return dataclasses.replace(found.scaled(PEAKS[name] / PEAKS[MEASURED]), where=where)


# GiB that torch sees of each, and of what a run may use: the rest goes to CUDA itself and to gaps that no tensor fits
# into. In the tables of docs/performance.md torch held 3 to 15 % more than tensors took, where it could.
MEMORY = {"h200": 139.8, "h100": 79.2, "h800": 79.2, "a100": 79.2, "a800": 79.2, "l40s": 44.4, "b200": 178.0}
USABLE = 0.92
