"""The evaluation of a case: what real installations with emulated instances did, beside what plan and simulator say."""
