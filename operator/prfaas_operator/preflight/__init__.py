"""`prfaas preflight`: looks at two clusters and the path between them before anything is installed.

command.py   the command, its flags and what it prints
look.py      asks an API server for facts: version, clock, rights, accelerators, admission, monitoring
jobs.py      runs the probe as a Job in each cluster, and removes what it made
probe.py     the program in those Jobs: measures the path; standard library only
facts.py     what was seen, as frozen structs
findings.py  pure: facts to findings, each with a verdict and a cure
proposal.py  pure: facts to a file for `kubectl apply`, and to what the planner expects of it
"""
