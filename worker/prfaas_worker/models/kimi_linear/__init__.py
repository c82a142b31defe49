"""Kimi Linear: three KDA layers to one MLA layer, mixture of experts; reads the public checkpoint layout.

`config` and `checkpoint` read a directory. `kda` (over `delta_rule`), `mla` and `layers` are the blocks.
`paged_batch` meets pages and slots. `model` puts all together.
"""
