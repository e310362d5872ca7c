"""A batch that nobody waits for ends in vLLM-Omni's engine too, and is no fault of it."""

import asyncio

from test_architectures import TABLE, config
from vllm_cases import vllm_rollout

GUARD = 60


def test_a_batch_that_nobody_waits_for_ends_quietly(capfd):
    row = next(row for row in TABLE if row.name == "QwenImagePipeline")
    engine = vllm_rollout(config(row, cfg=False, noise=0.7))

    async def leave():
        params = {"seed": 1, "num_inference_steps": 50_000, "noise_level": 0.0, "max_sequence_length": 64}
        call = asyncio.create_task(engine.generate([1, 2, 3], params, "long"))
        while not engine._running:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call], timeout=GUARD)
        await asyncio.wait_for(asyncio.to_thread(engine.drain), GUARD)
        short = {**params, "num_inference_steps": 2}
        return await asyncio.wait_for(engine.generate([1, 2, 3], short, "short"), GUARD)

    assert asyncio.run(leave()).image.ndim == 3
    engine.stop()
    said = "".join(capfd.readouterr())
    assert "RequestAborted" not in said and "Traceback" not in said
