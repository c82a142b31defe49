"""Paragraphs that are the same on the page of each evaluation: what the systems are made of, how they are served, and
how their requests are counted."""

from typing import Final

NO_GPU: Final = (
    "The systems were served live, and their instances were emulated: each took the time that its profile says, on a "
    "machine without a GPU."
)
PLACES: Final = (
    "A prefill reads a prompt and makes its cache; a decode makes the answer from it, token by token. Requests arrive "
    "in the hub, the cluster of the instances whose names end with -prefill or -decode. The others are elsewhere: in a "
    "cluster that prefills alone, and whose caches cross a link to the hub."
)
EMULATED: Final = (
    "All but the arithmetic of the model is real. Two clusters with API servers run the operator, the scheduler, the "
    "gateway and the instances, and caches cross a shaped link. An instance queues, batches and hands over as always; "
    "in place of computing it waits as long as its profile says."
)
COUNTED: Final = (
    "A request is sent at its time, however many wait, and its first token is timed from then. The beginning of each "
    "run is left out, at least a tenth, and so is its end, as long as the limit: nothing comes behind it. Intervals "
    "hold the true value in 95 of 100 cases: of up to two runs by batches of requests, and from three runs on by their "
    "spread. Close to its limit a system's queue remembers long; there the interval of a single run is rather too "
    "short."
)
COUNTED_WHOLE: Final = (
    "A request is sent at its time, however many wait, and its first token is timed from then. All requests of a run "
    "count, from its beginning to its end. The simulator served the same requests; the thresholds that stay are those "
    "that it found best for them."
)
BORNE: Final = (
    "What a link bears is the threshold of the plan over it, of which so much is used as the policy asks for: the "
    "middle between its watermarks. Where the hub with that threshold would carry less than arrives, it is the one "
    "that uses all of the link. Settled means so close to it until the link changes again, from when it is nearer to "
    "it than to what the link bore before, and is so for half of the rest at least."
)
EXPECTED: Final = (
    "Beside what was measured stands what was expected. The plan is what the equations of prfaas plan say. The "
    "simulator is that of prfaas simulate: it serves the same requests in virtual time, and is counted alike."
)
SATURATED: Final = (
    "The most that a system serves is measured in two ways. One is to send more than it serves, and to count the work "
    "that it does. Short prompts overtake long ones then, so each request counts as its prefill's time over that of "
    "the mean prompt of its pool. It counts evenly over the time in which it was prefilled, not when its answer ends: "
    "what is prefilled in a second hardly varies while all instances work. Where the plan says that decodes limit the "
    "system, each request counts as one, evenly from its first to its last token; decodes that are slower than the "
    "plan says are not seen otherwise. What is counted one by one stands beside it."
)
WITHIN: Final = (
    "The other is to look for the highest load whose first tokens keep a limit: nine of ten come within it, which is "
    "called P90. A load holds if the interval of P90 lies within the limit. It breaks the limit if the interval lies "
    "above, or if in most of its runs more requests arrive than end, or many are refused. Close to the limit requests "
    "may pile up by chance: a load does not hold then, but where they do in fewer than half of its runs, all of these "
    "count for its times. The limit lies between the highest load that holds and the lowest that breaks. Where one "
    "that breaks lies below one that holds, neither counts."
)
NO_FIRST_TOKENS: Final = (
    "No load was served that a system carries, so there is no time to the first token to compare: while queues grow, "
    "that grows with the length of the run."
)
LINK_USE: Final = (
    "How much of the link is used means the same for all three: the bits that crossed it, of what the case declares "
    "that it carries. Those measured are of the connections to the hub, with headers and TLS, and multiplied by the "
    "scale of the caches; those of plan and simulator are of the caches alone."
)
RUNS: Final = (
    "A lost request got no whole answer. A fallback is one whose transfer failed, and whose prompt was prefilled once "
    "more where it is decoded."
)
