"""The rollout engine on vLLM-Omni. Its files import vllm, which is an extra: import them when they are used."""
