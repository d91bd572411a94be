"""Benchmarks, run from a checkout (not installed).

harness.py measures, bench_<family>.py holds the cases, report.py makes tables and plots, NOTES.md says how and why.
"""
