"""What `prfaas evaluate` has to say: a page for people, and the document of a published evaluation."""
