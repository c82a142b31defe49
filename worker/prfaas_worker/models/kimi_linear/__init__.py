"""Kimi Linear: three KDA layers to one MLA layer, mixture of experts; reads the public checkpoint layout.

`config` and `weights` read a checkpoint, `kda` is the recurrence, `layers` the blocks, `model` puts them together.
"""
