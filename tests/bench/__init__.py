"""Figures against the peer and the limit, both in one run: `make bench`, or `python -m tests.bench --help`."""
