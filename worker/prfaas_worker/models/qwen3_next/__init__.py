"""Qwen3-Next: transformers computes, and our pages and slots hold its cache. vLLM serves it as well, so the two engines
are held to the same log probabilities.

`config` refuses checkpoints before anything is loaded. `cache` puts the cache objects that transformers' model calls
over our memory. `model` loads a checkpoint and is the engine's `Model`. Importing transformers takes seconds, so only
`load_model` imports the last two, and only for such a checkpoint.
"""
