"""Runs in vLLM's own environment: destinations' requests in vLLM's own scheduler and cache manager, with drafts of
each kind, and with our connector's scheduler side. No model runs.

A destination with drafts has blocks for them behind the state, and computes drafts beside the token that its prompt
ends with. Prints JSON: of each mode vLLM's groups, what was wrong with a fetch or with the first step after it, and how
often the state's block is the last one that the request has, where it would be without drafts.
"""

import itertools
import json
from typing import Any, NamedTuple

from scheduler_steps import BUDGET, LENGTHS, PAGE, Instance, Mode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from prfaas.wire.transfer import LayerGroup
from prfaas_vllm.blocks import VllmGroup
from prfaas_vllm.scheduling import BlockIds, Fetching, goal_of

MODES = {
    "none": Mode(),
    "n-gram": Mode("n-gram"),
    "n-gram, finer hits": Mode("n-gram", unit=64),
    "MTP": Mode("MTP"),
    "MTP, checkpoints": Mode("MTP", has_checkpoints=True),
    "MTP, no prefix cache": Mode("MTP", caches_prefixes=False),
    "a draft of larger blocks": Mode("MTP", draft_heads=1),
}


class Answer(NamedTuple):
    """What vLLM did with a destination's request: what it fetched, if not all was there, its first step's tokens and
    blocks, and how many tokens of its prompt it computed."""

    fetching: Fetching | None
    begun_at: int
    block_ids: BlockIds
    computed: int
    drafts: int


class Destination(Instance):
    def answer(self, ids: list[int], room: int) -> Answer:
        """Have a request answered, whose cache comes at once."""
        request = self.add("destination", ids, room)
        output = self.scheduler.schedule()
        fetching = next(iter(output.kv_connector_metadata.plan.fetches), None)
        if fetching is not None:
            assert not output.num_scheduled_tokens, "it waits for its cache"
            came = KVConnectorOutput(finished_recving={request.request_id})
            self.scheduler.update_from_output(output, ModelRunnerOutput([], {}, kv_connector_output=came))
            output = self.scheduler.schedule()
        (new,) = output.scheduled_new_reqs
        drafts, computed = self._drafts(output, request.request_id), 0
        while not request.is_finished():
            tokens = output.num_scheduled_tokens[request.request_id] - self._drafts(output, request.request_id)
            left = len(ids) - new.num_computed_tokens - computed
            computed += min(tokens, left)
            self.end(output, request.request_id, [7] if tokens >= left else [])
            output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, ModelRunnerOutput([], {}))
        return Answer(fetching, new.num_computed_tokens, new.block_ids, computed, drafts)

    def blocks_between(self, block_ids: BlockIds, start: int, end: int) -> list[list[int]]:
        """What the connector fetches into, by group."""
        found = []
        for number, group in enumerate(self.groups):
            page = group.kv_cache_spec.block_size
            is_state = isinstance(group.kv_cache_spec, MambaSpec)
            layout = LayerGroup("linear", (0,), (), 1) if is_state else LayerGroup("attention", (0,), (), page)
            of_group = VllmGroup(number, page, layout, {}, (), lambda _: "")
            found.append(of_group.blocks_between(block_ids[number], start, end))
        return found

    def _drafts(self, output: SchedulerOutput, request_id: str) -> int:
        return len(output.scheduled_spec_decode_tokens.get(request_id, ()))


def wrong_with(found: Answer, prompt: int, has: int, instance: Destination) -> str:
    """Return what is wrong with an answer, of whose prompt the instance had so many tokens."""
    goal = goal_of(prompt, PAGE)
    if found.computed != prompt - found.begun_at:
        return f"{found.computed} tokens are computed, {prompt - found.begun_at} are left"
    # vLLM has found all of it here. Where blocks of a draft are larger it may think again: then it computes the prompt.
    if found.fetching is None:
        return ""
    start, end = found.fetching.start, found.fetching.goal
    if (start, end, found.begun_at) != (has, goal, goal):
        return f"{start} to {end} is fetched with {has} of {goal} here, then it begins at {found.begun_at}"
    fetched = instance.blocks_between(found.fetching.block_ids, start, end)
    # The worker reads a new request's state from the column of the last token before it: the connector's blocks must
    # be those of the step.
    if fetched != instance.blocks_between(found.block_ids, start, end):
        return f"{fetched} are fetched, the step has {found.block_ids}"
    ids = [block for blocks in fetched for block in blocks]
    return f"{fetched} are fetched" if 0 in ids or len(set(ids)) < len(ids) else ""


def report(mode: Mode) -> dict[str, Any]:
    instance, wrong, last, padded, fetches = Destination(mode), list[str](), 0, list[int](), 0
    for number, (length, room) in enumerate(itertools.product(LENGTHS, (BUDGET, 300))):
        ids = [100 + number, *[7] * (length - 1)]
        # Fresh, and with the pages that the first has left here.
        for one in range(2):
            found = instance.answer(list(ids), room)
            has = found.fetching.start if one and found.fetching else 0
            if reason := wrong_with(found, length, has, instance):
                wrong.append(f"{length} tokens: {reason}")
            if found.fetching is None:
                continue
            fetches += 1
            blocks = instance.blocks_between(found.fetching.block_ids, 0, found.fetching.goal)
            last += all(blocks[group] == [found.fetching.block_ids[group][-1]] for group in instance.states)
            padded.append(found.drafts)
    groups = [
        (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, group.layer_names)
        for group in instance.groups
    ]
    return {"groups": groups, "wrong": wrong, "fetches": fetches, "last": last, "drafts": max(padded)}


if __name__ == "__main__":
    print(json.dumps({name: report(mode) for name, mode in MODES.items()}))
