"""Serves every hybrid family but Kimi Linear: transformers computes, and our pages and slots hold its cache.

`families` lists the served ones, and refuses others before anything is loaded. `cache` puts the cache objects that
transformers' models call over our memory. `model` loads a checkpoint and is the engine's `Model`. Importing
transformers takes seconds, so only `load_model` imports the last two, and only for such a checkpoint.
"""
