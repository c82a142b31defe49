"""What an engine drafts with is read from its flags, and what they leave open refuses nothing."""

import pytest

from prfaas.routing.drafts import NO_LAYERS, OPEN, draft_layers, drafts_fit

FLAG = "--speculative-config"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], NO_LAYERS),
        (["--max-num-seqs", "8"], NO_LAYERS),
        ([FLAG, '{"method": "mtp", "num_speculative_tokens": 2}'], "mtp"),
        ([f'{FLAG}={{"method": "eagle3", "model": "a/b"}}', "--seed=1"], "eagle3"),
        (["--speculative_config", '{"method": "qwen3_next_mtp"}'], "mtp"),
        ([FLAG, '{"method": "ngram", "num_speculative_tokens": 3}'], NO_LAYERS),
        ([FLAG, '{"method": "suffix"}'], NO_LAYERS),
        ([FLAG, '{"model": "a/b"}'], OPEN),
        ([FLAG, '{"method": 3}'], OPEN),
        ([FLAG, "[1]"], OPEN),
        ([FLAG, "{"], OPEN),
        ([FLAG, "[" * 100_000], OPEN),
        ([FLAG, '{"method": "custom_class"}'], NO_LAYERS),
        ([FLAG, '{"method": "a later one"}'], OPEN),
        (["--config", "flags.yaml"], OPEN),
        ([FLAG], OPEN),
        ([f"{FLAG}.method", "mtp"], OPEN),
        (["-sc", '{"method": "mtp"}'], OPEN),
        (["--spec-method=mtp"], OPEN),
        (["--specialize-active-lora"], NO_LAYERS),
    ],
)
def test_flags_name_the_layers_that_draft_or_leave_them_open(words: list[str], found: str):
    assert draft_layers(FLAG, words) == found
    assert draft_layers("", words) == OPEN, "of an engine whose flags are not known"


def test_only_known_layers_that_differ_do_not_fit():
    kinds = (NO_LAYERS, "mtp", "eagle3", OPEN)
    unfit = {(one, other) for one in kinds for other in kinds if not drafts_fit(one, other)}
    known = {NO_LAYERS, "mtp", "eagle3"}
    assert unfit == {(one, other) for one in known for other in known if one != other}
