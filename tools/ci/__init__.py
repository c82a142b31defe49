"""Runs the tests in stages: a sweep, the stages with one honest second try, a verdict, and a soak."""
