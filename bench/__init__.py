"""Benchmarks, run from a checkout (not installed).

harness.py measures, bench_<family>.py holds the cases, report.py makes docs/performance.md, figures.py draws
its figures. README.md says how a number is made, experiments/ what was tried.
"""
