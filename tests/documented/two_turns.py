"""An agent loop of somebody's own: it draws twice, returns the second image, and says which requests are trained on."""

import os

from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopBase, register
from verl_omni.agent_loop.outputs import DiffusionAgentLoopOutput


@register("two_turns")
class TwoTurns(DiffusionAgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        answers, limit = [], sampling_params["max_sequence_length"]
        for turn in range(2):
            ids = self.adapter.tokenize(kwargs["tokenizers"], f"{kwargs['prompt']}, turn {turn}", limit, None)
            negative = self.adapter.tokenize(kwargs["tokenizers"], " ", limit, None)
            answers.append(
                await self.server.generate.remote(
                    prompt_ids=ids,
                    sampling_params=sampling_params | {"seed": sampling_params["seed"] + turn},
                    request_id=f"{sampling_params['seed']}-{turn}",
                    negative_prompt_ids=negative,
                )
            )
        named = [answers[int(number)] for number in os.environ["TRAINED_TURNS"].split(",")]
        return DiffusionAgentLoopOutput(answers[1].response, ids, {}, trained=named)
