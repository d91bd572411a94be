"""Benchmarks, run from a checkout (not installed).

harness.py measures, bench_<family>.py holds the cases, saved.py reads what was saved, report.py makes
docs/performance.md of it, figures.py draws. README.md says how a number is made, experiments/ what was tried.
"""
