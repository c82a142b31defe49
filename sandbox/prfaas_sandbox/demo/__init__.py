"""`prfaas demo`: the whole system on one machine, real prompts, a link that narrows and widens, a worker that dies."""
